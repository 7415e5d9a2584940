"""What a learner says and does when something around it is wrong; its loop is in test_train.py."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from room import Room
from waiting import Until

from clawq.algorithms.td3_learner import Td3
from clawq.config import Budget
from clawq.errors import AlgorithmFault, CheckpointInvalid
from clawq.programs import learner, learning
from clawq.programs.quarantine import QUARANTINE_FILE

MakeRoom = Callable[..., Room]


# --- algorithm plugins ---------------------------------------------------------------------------------------------


def test_a_td_error_that_is_no_number_ends_the_run_with_the_plugins_name(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = make_room(replay={"sampler": "prioritized"})
    trainer = room.trainer()
    monkeypatch.setattr(Td3, "td_error", torch.tensor([0.5] * 15 + [float("nan")]))
    room.actor("a")
    with pytest.raises(AlgorithmFault, match=r"plugin td3 .* td_error of 1 of 16 rows .*first: nan.*sampler=uniform"):
        trainer.train(Until(lambda: trainer.parts.updater.updates > 3))
    # The priorities are as they were before.
    assert trainer.parts.sampler.check_valid() == (True, "")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.tensor([1.0, float("inf")]), r"1 of 2 rows .*first: inf"),
        (torch.tensor([1e30, -1e30]), r"2 of 2 rows .*first: 1e\+30"),
        (torch.zeros(3), r"td_error is \[3\]; a tensor \[2\] was expected"),
        (torch.zeros(2, 1), r"td_error is \[2, 1\]"),
        (None, "td_error is NoneType"),
    ],
)
def test_whatever_cannot_be_a_priority_is_refused_by_the_plugins_name(given: Any, told: str) -> None:
    with pytest.raises(AlgorithmFault, match=f"the algorithm plugin mine is at fault: .*{told}"):
        learning.td_errors(SimpleNamespace(td_error=given), 2, "mine")


# --- commands ------------------------------------------------------------------------------------------------------


def test_every_quarantine_command_is_answered_once_and_names_that_nobody_knows_are_told(make_room: MakeRoom) -> None:
    room = make_room()
    trainer = room.trainer()
    room.actor("host-w1-0")
    trainer.train(Until(lambda: trainer.parts.intake.fragments > 0))
    command = trainer.parts.quarantine.command
    # Two commands without a request are two commands, and each is carried out once
    assert command("1-1", {"op": "list"}) == {"request": "1-1", "rules": []}
    assert command("1-2", {"op": "list"}) == {"request": "1-2", "rules": []}
    assert command("1-2", {"op": "list"}) is None
    assert command("1-3", {"op": "list", "request": "mine"}) == {"request": "mine", "rules": []}
    assert command("1-4", {"op": "list", "request": "mine"}) is None
    # What nobody has heard of is told with what is known, the nearest first
    answer = command("1-5", {"op": "add", "slot": "host-w2-0", "worker": "tset"})
    assert answer is not None
    assert answer["unknown"] == {"worker": ["test"], "slot": ["host-w1-0"]}
    assert answer["fragments"] == 0
    answer = command("1-6", {"op": "add", "slot": "host-w1-0", "worker": "test"})
    assert answer is not None
    assert answer["unknown"] == {}
    assert answer["fragments"] > 0


# --- resuming ------------------------------------------------------------------------------------------------------


def test_a_resume_that_fails_late_leaves_no_file_open(make_room: MakeRoom) -> None:
    room = make_room(metrics=["jsonl"])
    trainer = room.trainer()
    room.actor("a")
    trainer.train(Until(lambda: trainer.parts.updater.updates > 0))
    trainer.checkpoint(wait=True)
    room.abandon(trainer)
    (room.run.folder / QUARANTINE_FILE).write_text("{")
    with pytest.raises(CheckpointInvalid, match=r"quarantine\.json is damaged"):
        room.trainer(resume=True)
    ours = [file.path for file in psutil.Process().open_files() if file.path.startswith(str(room.run.folder))]
    assert ours == []


def test_a_resumed_run_with_nothing_left_to_spend_says_so_with_what_would_give_it_more(make_room: MakeRoom) -> None:
    room = make_room(budget={"env_steps": 200})
    trainer, said = room.trainer(), list[str]()
    learner.tell_spent(trainer, room.run, said.append)
    assert said == []
    room.actor("a")
    trainer.train(Until(lambda: False))
    trainer.checkpoint(wait=True)
    room.abandon(trainer)
    second = room.trainer(resume=True)
    learner.tell_spent(second, room.run, said.append)
    assert len(said) == 1
    assert "nothing more is learned: the budget is spent (" in said[0]
    assert f"clawq up --resume {room.run.folder} budget.env_steps=400" in said[0]
    second.parts.budget.budget = Budget(seconds=0.001)
    second.parts.budget.used_before_s = 3.0
    learner.tell_spent(second, room.run, said.append)
    assert "3 of 0.001 s of wall time" in said[1]
