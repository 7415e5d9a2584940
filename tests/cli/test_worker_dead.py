"""`clawq worker dead`: what workers have set aside is listed, shown, given back and dropped."""

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clawq.cli.main import run
from clawq.control.queues import COMMAND_HEADER
from clawq.transport.commands import MAX_ATTEMPTS, Commands, pack_arguments
from clawq.transport.keys import CELERY_PREFIX, DEAD_COMMANDS_KEY, attempts_key

QUEUE = "clawq.test-dead"


@pytest.fixture
def buried(named_servers: Any, broker_client: Any) -> Iterator[Commands]:
    """Garbage, a poison, and one too long to be kept whole; oldest first. Nothing else is there."""
    broker_client.unlink(DEAD_COMMANDS_KEY)
    commands = Commands(broker_client)
    commands.bury("garbage", QUEUE, b"\xff\x07nonsense", "w1")
    commands.bury("attempts", QUEUE, pack_arguments(["one"], {"path": "a\x1b[2Jb"}), "w2", "lab.poison", "ab" * 16)
    commands.bury("attempts", QUEUE, pack_arguments([], {"text": "x" * 5000}), "w2", "lab.long", "cd" * 16)
    yield commands
    broker_client.unlink(DEAD_COMMANDS_KEY, CELERY_PREFIX + QUEUE, attempts_key("ab" * 16))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*words: str) -> tuple[int, str]:
        status = run(["worker", "dead", *words])
        out, err = capsys.readouterr()
        return status, out + err

    return call


def test_dead_commands_are_listed_and_shown_with_the_reason_and_what_can_be_done(
    buried: Commands, said: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    listed = said("ls")[1]
    lines = listed.splitlines()
    assert [word in line for word, line in zip(("garbage", "lab.poison", "lab.long"), lines[1:], strict=True)] == [
        True
    ] * 3
    # (What a terminal takes for a colour, click leaves out by itself where there is none.)
    assert "\x07" not in listed
    facts = [json.loads(line) for line in said("ls", "--json")[1].splitlines()]
    assert [one["can_be_given_back"] for one in facts] == [False, True, False]
    status, shown = said("show", facts[1]["id"])
    assert status == 0
    for words in ("no worker lived to see its end", "lab.poison", QUEUE, "w2", '"path"', "ab" * 16):
        assert words in shown
    assert json.loads(said("show", facts[2]["id"], "--json")[1])["task"] == "lab.long"
    run(["status"])
    assert "`clawq worker dead ls`" in capsys.readouterr().out


def test_a_dead_command_is_given_back_whole_with_its_attempts_before_it_and_only_if_it_is_one(
    buried: Commands, said: Callable[..., tuple[int, str]], broker_client: Any
) -> None:
    long, poison, garbage = buried.dead()
    for _ in range(MAX_ATTEMPTS + 1):
        buried.begin(poison.command)
    assert said("retry", poison.id) == (0, f"{poison.id}: given back to the queue {QUEUE}\n")
    [message] = [json.loads(raw) for raw in broker_client.lrange(CELERY_PREFIX + QUEUE, 0, -1)]
    args, kwargs, _ = json.loads(base64.b64decode(message["body"]))
    assert (args, kwargs, message["headers"]["task"]) == (["one"], {"path": "a\x1b[2Jb"}, "lab.poison")
    assert message["headers"][COMMAND_HEADER] == poison.command
    assert buried.begin(poison.command) == 1
    assert [one.id for one in buried.dead()] == [long.id, garbage.id]
    for one, why in ((garbage, "it is no command"), (long, "not all of it was kept")):
        status, told = said("retry", one.id)
        assert status == 2
        assert why in told
        assert f"clawq worker dead drop {one.id}" in told
    assert broker_client.llen(CELERY_PREFIX + QUEUE) == 1


def test_dead_commands_are_dropped_one_by_one_or_all(
    buried: Commands, said: Callable[..., tuple[int, str]], broker_client: Any
) -> None:
    newest = buried.dead(1)[0]
    assert said("drop", newest.id) == (0, "dropped: 1\n")
    status, told = said("drop", newest.id)
    assert status == 2
    assert "there is no dead command" in told
    assert said("drop")[0] == 2
    assert said("drop", "--all") == (0, "dropped: 2\n")
    assert said("ls") == (0, "no dead commands\n")
    # A worker may write there whatever it likes, times that no calendar has too
    broker_client.xadd(DEAD_COMMANDS_KEY, {"reason": "?"}, id="9999999999999999999-1")
    status, told = said("ls")
    assert status == 0
    assert "9999999999999999999" in told
