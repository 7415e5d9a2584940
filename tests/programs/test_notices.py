"""What people are told, how often, and for how long."""

from clawq.programs.notices import FAILURE_INTERVAL_S, SHOWN_S, Notices


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_notice_is_shown_for_a_while() -> None:
    clock = Clock()
    notices = Notices(clock)
    assert notices.recent == ""
    notices.tell("the disk is full\nand more")
    assert notices.recent == "the disk is full"
    clock.now_s += SHOWN_S + 1
    assert notices.recent == ""


def test_failures_are_all_counted_and_told_now_and_then() -> None:
    clock = Clock()
    notices = Notices(clock)
    assert notices.failed("actor", {"worker": "w1", "error": "boom\ntrace"}) == "boom\ntrace"
    assert notices.recent == "an actor on w1 failed: boom"
    for _ in range(5):
        notices.failed("actor", {"worker": "w2", "error": "bang"})
    assert notices.recent == "an actor on w1 failed: boom"
    clock.now_s += FAILURE_INTERVAL_S
    notices.failed("actor", {"error": ""})
    assert notices.recent == "an actor failed (7 failures so far): it gave no reason"
    assert notices.failures == {"actor": 7, "evaluation": 0}
    for told, count in ((8, 8), (-3, 8), ("x", 8), (True, 8), (None, 8), (4, 12)):
        notices.failed("actor", {"broken_off": told})
        assert notices.broken_off == count


def test_topics_do_not_silence_one_another() -> None:
    clock = Clock()
    notices = Notices(clock)
    notices.tell_now_and_then("a", "first", 10.0)
    notices.tell_now_and_then("b", "second", 10.0)
    assert notices.recent == "second"
    notices.tell_now_and_then("a", "third", 10.0)
    assert notices.recent == "second"
