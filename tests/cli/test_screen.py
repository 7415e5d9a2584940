"""The screen: pure rows and lines, and what reaches a terminal or a file."""

import io
import os
import pty
import re
from pathlib import Path

import pytest

from clawq.cli.screen import Screen, Snapshot, drops, duration, line, number, rows
from clawq.metrics import describe

FULL: Snapshot = {
    "run": "hand-reach-s0",
    "stage": "training",
    "wall_s": 187.0,
    "time_left_s": 3729.0,
    "env_steps": 123_456.0,
    "env_steps_per_s": 2150.0,
    "updates": 9876.0,
    "updates_per_s": 61.3,
    "policy_lag/mean": 1.5,
    "policy_lag/max": 4.0,
    "unread_fragments": 3.0,
    "stored_bytes": 12_300_000.0,
    "ring/fill": 0.617,
    "ring/size": 123_456.0,
    "workers": 1.0,
    "slots": 4.0,
    "episode/return": -3.21,
    "episode/success": 0.25,
    "eval/mean_return": -1.234567,
    "eval/success": 0.8,
    "drops/stale": 320.0,
    "drops/outbox_full": 0.0,
    "rejected/corrupt": 1.0,
    "note": "saving",
}


def test_a_full_snapshot_tells_everything_in_the_order_people_ask() -> None:
    assert rows(FULL) == [
        ("stage", "training"),
        ("time", "3:07, 1:02:09 left"),
        ("env steps", "123k, 2.15k/s"),
        ("updates", "9.88k, 61.3/s"),
        ("policy lag", "mean 1.5, max 4"),
        ("unread", "3 fragments, 12.3 MB stored"),
        ("ring", "62%, 123k env steps"),
        ("workers", "1, 4 slots"),
        ("training", "return -3.21, success 25%"),
        ("evaluation", "return -1.235, success 80%"),
        ("drops", "stale 320 env steps, corrupt 1 fragments"),
        ("note", "saving"),
    ]


def test_demonstrations_and_quarantines_are_shown_where_there_are_any() -> None:
    some = {"demonstrations/env_steps": 5000.0, "demonstrations/rows": 64.0, "quarantine/rules": 2.0}
    assert rows({**some, "quarantine/masked": 310.0}) == [
        ("demonstrations", "5k env steps, 64 rows a batch"),
        ("quarantine", "2 rules, 310 env steps masked"),
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert rows({}) == []
    assert line({"stage": "starting"}) == "starting"
    assert rows({"stage": "x", "eval/success": float("nan"), "eval/mean_return": -1.0}) == [
        ("stage", "x"),
        ("evaluation", "return -1"),
    ]


def test_no_drops_are_told_once_there_is_experience() -> None:
    assert drops({}) == ""
    assert drops({"env_steps": 1.0, "drops/stale": 0.0}) == "none"


def test_every_number_on_the_screen_is_in_the_catalogue() -> None:
    texts = {"run", "stage", "note"}
    assert [name for name in FULL if name not in texts and describe(name) is None] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (3.21, "3.2"), (950.4, "950"), (999_999, "1000k"), (12_345, "12.3k"), (4.56e6, "4.56M")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1:00"), (3600, "1:00:00")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_a_line_comes_now_and_then_and_at_once_when_the_stage_changes() -> None:
    out, now = io.StringIO(), [0.0]
    with Screen(out, plain_interval_s=10.0, clock=lambda: now[0]) as screen:
        for second, stage in [(0, "filling"), (1, "filling"), (9, "filling"), (10, "filling"), (11, "training")]:
            now[0] = second
            screen.show({"stage": stage, "env_steps": float(second)})
        screen.say("picture: hand.gif")
    told = out.getvalue().splitlines()
    assert [text.split(" |")[0] for text in told] == ["filling", "filling", "training", "picture: hand.gif"]
    assert "\x1b" not in out.getvalue()


def shown(main: int) -> str:
    """All that a terminal got, once its other side is closed: one read may return a part of it."""
    parts: list[bytes] = []
    while True:
        try:
            parts.append(os.read(main, 100_000))
        except OSError:  # EIO: the other side is closed and all is read
            return b"".join(parts).decode()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    main, side = pty.openpty()
    try:
        with os.fdopen(side, "w") as out, Screen(out) as screen:
            screen.show({"run": "demo", "stage": "filling", "actor_failures": 3})
            # Seen at once, not when the run is over
            seen = os.read(main, 100_000).decode()
    finally:
        os.close(main)
    assert seen.strip() == "filling | failures 3 actors"


def test_on_a_terminal_the_table_is_live_and_the_last_one_stays(tmp_path: Path) -> None:
    main, side = pty.openpty()
    try:
        with os.fdopen(side, "w") as out:
            with Screen(out) as screen:
                screen.show({"run": "demo", "stage": "filling"})
                screen.say("a line that stays [not markup]")
                screen.show({"run": "demo", "stage": "training [x]"})
            screen.close()
        seen = shown(main)
    finally:
        os.close(main)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert "a line that stays [not markup]" in text
    assert text.rindex("training [x]") > text.rindex("filling")
    assert "\x1b[?25h" in seen, "the cursor must be shown again"


def test_the_round_and_who_is_missing_are_shown() -> None:
    waiting = "12, waiting for seat-001 (32 of 128 steps)"
    assert ("round", waiting) in rows({"stage": "waiting for a round", "round": waiting})
    assert "round" not in dict(rows({"stage": "training"}))
