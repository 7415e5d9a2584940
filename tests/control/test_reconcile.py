"""What should be in the queues, for every state that a run can be in."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawq.control.evaluations import Evaluations
from clawq.control.reconcile import (
    ABSENT_S,
    MAX_ATTEMPTS,
    PICKUP_S,
    Desired,
    DropLeases,
    Evaluation,
    GiveUp,
    ReportGone,
    SendEvaluation,
    SendLeases,
    Snapshot,
    leases_wanted,
    reconcile,
)
from clawq.transport.control import Event

RUNNING = Desired(collect=True, max_actors=1000, evaluation_timeout_s=100.0)
WANTED = Evaluation("1-0", version=7, label="final", episodes=5, wanted_s=0.0)


def test_two_leases_wait_while_no_worker_is_in_sight() -> None:
    assert reconcile(RUNNING, Snapshot(waiting=0), 0.0) == [SendLeases(2)]
    assert reconcile(RUNNING, Snapshot(waiting=2), 0.0) == []


def test_every_free_slot_gets_a_lease_and_two_more_wait() -> None:
    assert reconcile(RUNNING, Snapshot(waiting=1, slots=8, busy=3), 0.0) == [SendLeases(6)]
    assert reconcile(RUNNING, Snapshot(waiting=2, slots=8, busy=8), 0.0) == []


def test_no_more_than_max_actors_are_kept_busy() -> None:
    few = replace(RUNNING, max_actors=4)
    assert reconcile(few, Snapshot(waiting=0, slots=8, busy=3), 0.0) == [SendLeases(1)]
    assert reconcile(few, Snapshot(waiting=0, slots=8, busy=4), 0.0) == []


def test_a_run_that_shall_not_collect_has_no_leases() -> None:
    assert reconcile(replace(RUNNING, collect=False), Snapshot(waiting=3, slots=8), 0.0) == [DropLeases()]
    assert reconcile(replace(RUNNING, collect=False), Snapshot(waiting=0, slots=8), 0.0) == []


@given(st.integers(0, 50), st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 1000))
def test_the_queue_is_bounded_and_one_turn_is_enough(waiting: int, slots: int, busy: int, most: int) -> None:
    desired = replace(RUNNING, max_actors=most)
    snapshot = Snapshot(waiting=waiting, slots=slots, busy=min(slots, busy))
    wanted = leases_wanted(desired, snapshot)
    assert 0 <= wanted <= slots - snapshot.busy + 2 + slots // 10
    sent = sum(action.count for action in reconcile(desired, snapshot, 0.0) if isinstance(action, SendLeases))
    after = replace(snapshot, waiting=waiting + sent)
    assert after.waiting >= wanted
    assert reconcile(desired, after, 0.0) == []


def evaluations(*outstanding: Evaluation) -> Snapshot:
    return Snapshot(waiting=2, evaluations=outstanding)


def test_an_evaluation_is_sent_once_and_again_only_if_nobody_began() -> None:
    assert reconcile(RUNNING, evaluations(WANTED), 0.0) == [SendEvaluation(WANTED)]
    sent = replace(WANTED, sent_s=0.0, attempts=1)
    assert reconcile(RUNNING, evaluations(sent), PICKUP_S) == []
    assert reconcile(RUNNING, evaluations(sent), PICKUP_S + 1) == [SendEvaluation(sent)]
    begun = replace(sent, started_s=3.0)
    assert reconcile(RUNNING, evaluations(begun), PICKUP_S + 50) == []


def test_an_evaluation_that_takes_too_long_or_that_nobody_takes_is_given_up() -> None:
    begun = replace(WANTED, sent_s=0.0, started_s=1.0)
    assert reconcile(RUNNING, evaluations(begun), 102.0 + PICKUP_S) == [GiveUp(begun, "timeout")]
    alone = replace(WANTED, sent_s=99.0)
    assert reconcile(RUNNING, evaluations(alone), 101.0 + PICKUP_S) == [GiveUp(alone, "no_worker")]


def test_a_newer_evaluation_of_the_same_label_replaces_one_that_nobody_began() -> None:
    newer = replace(WANTED, id="2-0", version=8, wanted_s=1.0)
    training = replace(WANTED, id="3-0", label="training", wanted_s=2.0, sent_s=2.0)
    assert reconcile(RUNNING, evaluations(WANTED, newer, training), 2.0) == [
        GiveUp(WANTED, "superseded"),
        SendEvaluation(newer),
    ]


def test_an_evaluation_whose_worker_is_gone_is_reported_as_failed() -> None:
    begun = replace(WANTED, sent_s=0.0, started_s=1.0, attempts=1, worker="a")
    missed = replace(begun, absent_s=10.0)
    assert reconcile(RUNNING, evaluations(begun), 10.0 + ABSENT_S + 1) == []
    assert reconcile(RUNNING, evaluations(missed), 10.0 + ABSENT_S) == []
    assert reconcile(RUNNING, evaluations(missed), 10.0 + ABSENT_S + 1) == [ReportGone(missed)]


def event(number: int, kind: str, **facts: object) -> Event:
    return Event(f"{number}-0", kind, facts)


def test_evaluations_are_folded_from_events() -> None:
    book = Evaluations(default_episodes=20)
    book.take(event(1, "lease", env_steps=5), 0.0)
    book.take(event(2, "evaluation_wanted", version=3, label="training", episodes=4), 1.0)
    book.take(event(3, "evaluation_wanted", version=4, label="final"), 2.0)
    assert [(e.version, e.label, e.episodes, e.wanted_s) for e in book.outstanding] == [
        (3, "training", 4, 1.0),
        (4, "final", 20, 2.0),
    ]
    book.take(event(4, "evaluation_started", id="2-0"), 3.0)
    assert [e.started_s for e in book.outstanding] == [3.0, None]
    book.take(event(5, "evaluation", id="2-0", mean_return=1.0), 4.0)
    book.take(event(6, "evaluation", id="2-0", mean_return=1.0), 4.0)
    assert [e.id for e in book.outstanding] == ["3-0"]


def test_a_failure_that_says_nothing_about_the_policy_is_tried_again_a_few_times() -> None:
    book = Evaluations(default_episodes=1)
    book.take(event(1, "evaluation_wanted", version=3), 0.0)
    for attempt in range(MAX_ATTEMPTS):
        [evaluation] = book.outstanding
        assert (evaluation.sent_s, evaluation.attempts) == (None, attempt)
        book.sent(evaluation, 1.0)
        book.take(event(2, "evaluation_failed", id="1-0", reason="stopped"), 2.0)
    assert book.outstanding == ()


def test_a_failure_that_would_come_again_is_final() -> None:
    book = Evaluations(default_episodes=1)
    book.take(event(3, "evaluation_wanted", version=3), 0.0)
    [evaluation] = book.outstanding
    book.sent(evaluation, 1.0)
    book.take(event(4, "evaluation_failed", id="3-0", reason="timeout"), 2.0)
    assert book.outstanding == ()


def test_a_worker_that_is_missed_is_noted_until_it_is_heard_of_again() -> None:
    book = Evaluations(default_episodes=1)
    book.take(event(1, "evaluation_wanted", version=3, label="final"), 0.0)
    book.take(event(2, "evaluation_wanted", version=3, label="training"), 0.0)
    book.take(event(3, "evaluation_started", id="1-0", worker="a"), 1.0)
    book.take(event(4, "evaluation_started", id="2-0"), 1.0)
    for workers, now_s, absent_s in (({"a"}, 2.0, None), ({"b"}, 3.0, 3.0), ({"b"}, 4.0, 3.0), ({"a"}, 5.0, None)):
        book.look_for(workers, now_s)
        assert [evaluation.absent_s for evaluation in book.outstanding] == [absent_s, None]


def test_an_evaluation_whose_worker_is_gone_is_sent_again_a_few_times_and_may_be_done_by_another() -> None:
    book = Evaluations(default_episodes=1)
    book.take(event(1, "evaluation_wanted", version=3, label="final"), 0.0)
    now_s = 0.0
    for attempt in range(MAX_ATTEMPTS):
        [evaluation] = book.outstanding
        assert reconcile(RUNNING, evaluations(evaluation), now_s) == [SendEvaluation(evaluation)]
        book.sent(evaluation, now_s)
        book.take(event(2, "evaluation_started", id="1-0", worker=f"w{attempt}"), now_s)
        book.look_for((), now_s)
        now_s += ABSENT_S + 1
        [evaluation] = book.outstanding
        assert reconcile(RUNNING, evaluations(evaluation), now_s) == [ReportGone(evaluation)]
        book.take(event(3, "evaluation_failed", id="1-0", reason="gone"), now_s)
    assert book.outstanding == ()


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"version": None},
        {"version": "newest"},
        {"version": [1]},
        {"version": float("inf")},
        {"version": 1, "episodes": "many"},
        {"version": 1, "episodes": {"a": 1}},
    ],
)
def test_an_event_that_cannot_be_understood_is_left_out(
    facts: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    book = Evaluations(default_episodes=1)
    book.take(event(1, "evaluation_wanted", **facts), 0.0)
    assert "event 1-0 wants an evaluation that cannot be understood" in caplog.text
    for kind in ("evaluation_started", "evaluation", "evaluation_failed"):
        book.take(event(2, kind), 0.0)
        book.take(event(3, kind, id=["1-0"], worker={}, reason=[]), 0.0)
    book.take(event(4, "evaluation_wanted", version=2), 0.0)
    assert [evaluation.version for evaluation in book.outstanding] == [2]
