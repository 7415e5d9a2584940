import re
from pathlib import Path

import pytest

import clawq
from clawq.transport import keys as keys_module
from clawq.transport.keys import DEAD_COMMANDS_KEY, NAME_PATTERN, RUNS_KEY, RunKeys, check_name, new_tag, queue_name


def every_key(keys: RunKeys) -> dict[str, str]:
    return {
        "control": keys.control,
        "s:<slot>": keys.stream("host-w-0"),
        "born": keys.born,
        "slots": keys.slots,
        "trimmed": keys.trimmed,
        "readers": keys.readers,
        "cursors:<reader>": keys.cursors(),
        "kept:<reader>": keys.kept("learner"),
        "ledger:<reader>": keys.ledger(),
        "swept": keys.swept,
        "claim:<what>": keys.claim("slot:host-w-0"),
        "w:<version>": keys.weights(3),
        "w:staging:<token>": keys.staging("ab"),
        "versions": keys.versions,
        "pins": keys.pins,
        "dead_letters": keys.dead_letters,
        "dead_entries": keys.dead_entries,
        "dead_letter_counts": keys.dead_letter_counts,
        "events": keys.events,
        "orders": keys.orders,
        "metrics": keys.metrics,
        "reaped": keys.reaped,
        "pace": keys.pace,
        "heartbeats": keys.heartbeats,
    }


def test_all_keys_of_a_run_share_one_cluster_hash_tag_and_differ() -> None:
    tag = new_tag()
    keys = list(every_key(RunKeys(tag)).values())
    assert len(set(keys)) == len(keys)
    assert {re.findall(r"\{(.*?)\}", key)[0] for key in keys} == {tag}


def test_the_table_in_the_module_names_every_key() -> None:
    table = set(re.findall(r"^\| `([^`]+)`", keys_module.__doc__ or "", re.MULTILINE))
    others = ("clawq.<run id>", "clawq:attempts:<id>", "clawq:c:*")
    assert table == {*every_key(RunKeys(new_tag())), RUNS_KEY, DEAD_COMMANDS_KEY, *others}


def test_keys_are_spelled_nowhere_else() -> None:
    root = Path(clawq.__file__).parent
    sources = [path for path in root.rglob("*.py") if path.name != "keys.py"]
    assert sources
    for path in sources:
        assert not re.search(r"""["']clawq:(\{|runs|attempts|dead)""", path.read_text()), f"{path} spells a key"


@pytest.mark.parametrize("tag", ["", "abc", "A" * 32, "g" * 32, "a" * 33, "*" * 32])
def test_a_tag_is_32_hex_digits(tag: str) -> None:
    with pytest.raises(ValueError, match="32 hex digits"):
        RunKeys(tag)


@pytest.mark.parametrize("name", ["", " a", "a b", "a{b}", "a*", "-a", "a/b", "a\n", "x" * 129])
def test_names_that_would_break_a_key_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be used in a Redis key"):
        check_name(name)
    with pytest.raises(ValueError, match="cannot be used"):
        RunKeys(new_tag()).stream(name)
    with pytest.raises(ValueError, match="cannot be used"):
        queue_name(name)


def test_usual_names_are_allowed() -> None:
    for name in ("host-w1-0", "a.b_c:d@e", "0", "x" * 128):
        assert check_name(name) == name
        assert NAME_PATTERN.fullmatch(name)
    assert queue_name("reach-20260101") == "clawq.reach-20260101"
