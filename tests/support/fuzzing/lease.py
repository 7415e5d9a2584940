"""Arguments of the tasks, and what else comes as a command by an event: tuning, quarantine, wanted evaluations."""

from typing import Any

from clawq.config_file import parse_config
from clawq.config_live import changed
from clawq.config_yaml import mapping_of
from clawq.control.arguments import LONGEST_LEASE_S, MOST_EPISODES, check_evaluation, check_lease, check_recording
from clawq.control.evaluations import Evaluations
from clawq.errors import ConfigError, UserError
from clawq.json_text import parse_json
from clawq.replay.quarantine import Rule
from clawq.transport.control import Event
from fuzzing import check_text

_CONFIG = parse_config(mapping_of("name: small\nenvironment: {name: point}\n", "small"), "small")
_EVALUATION = ("run_id", "version", "episodes", "seed", "timeout_s", "label", "evaluation")


def one_input(data: bytes) -> None:
    """JSON arguments for each of the commands."""
    try:
        arguments = parse_json(data)
    except ValueError:
        return
    if not isinstance(arguments, dict):
        return
    _lease(arguments)
    _programs(arguments)
    _commands(arguments)


def _lease(given: dict[str, Any]) -> None:
    try:
        check_lease(given.get("run_id"), given.get("seconds"))
    except UserError as error:
        check_text(error)
        return
    assert 0 < given["seconds"] <= LONGEST_LEASE_S


def _programs(given: dict[str, Any]) -> None:
    try:
        check_evaluation(*(given.get(name) for name in _EVALUATION))
        assert 0 < given["episodes"] <= MOST_EPISODES
    except UserError as error:
        check_text(error)
    try:
        check_recording(given.get("run_id"), given.get("request"), given.get("timeout_s"))
        assert not {"run", "data_url"} & given["request"].keys()
    except UserError as error:
        check_text(error)


def _commands(given: dict[str, Any]) -> None:
    try:
        rule = Rule.of_facts(given)
        assert Rule.of_facts(rule.facts()) == rule
        rule.covers(_Anything())
    except UserError as error:
        check_text(error, 2000)
    words = given.get("set")
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        try:
            changed(_CONFIG, words)
        except ConfigError as error:
            check_text(error, 100_000)
    evaluations = Evaluations(5)
    for kind in ("evaluation_wanted", "evaluation_started", "evaluation_failed", "evaluation"):
        evaluations.take(Event("1-1", kind, given), 0.0)
    assert all(0 < one.episodes <= MOST_EPISODES for one in evaluations.outstanding)


class _Anything:
    worker, slot, epoch, seq, created_ms = "host/w", "slot-1", 5, 1, 10**12


def seeds() -> list[bytes]:
    """What coordinators and command lines send."""
    return [
        b'{"run_id": "hand-1", "seconds": 5.0}',
        b'{"run_id": "hand-1", "version": 3, "episodes": 5, "seed": 0, "timeout_s": 300.0, "label": "final", '
        b'"evaluation": "1-1"}',
        b'{"run_id": "hand-1", "request": {"out": "a.gif", "trained": 3, "seed": 1, "episodes": 2}, "timeout_s": 9}',
        b'{"slot": "s-0", "epoch": 4, "first_seq": 1, "last_seq": 7, "reason": "odd", "lifted": {"s-0": "4-7"}}',
        b'{"worker": "host/w", "since_ms": 5, "until_ms": 70}',
        b'{"set": ["rate_limit.samples_per_insert=4", "budget.env_steps=1e6", "replay.prioritized.beta=0.4"]}',
        b'{"version": 3, "episodes": 5, "id": "1-1", "worker": "w", "reason": "timeout", "label": "periodic"}',
    ]
