"""Files of a run folder that are not what clawq wrote: told with the file, the place in it, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawq.config import RunConfig
from clawq.errors import CheckpointInvalid, ClawqError, UserError
from clawq.programs.audit import LEDGER_FILE, read_ledger
from clawq.programs.balance import Balance, Row
from clawq.programs.run import Run, make_folders, open_run
from clawq.programs.whereabouts import find_run
from clawq.testing.experience import SPEC
from clawq.transport.keys import new_tag

SUMS: dict[str, Any] = {
    **dict.fromkeys(("entries", "committed", "committed_steps", "duplicates", "produced_steps"), 0),
    **dict.fromkeys(("refused_steps", "unaccounted_steps", "missed_steps"), 0),
    **{name: {} for name in ("rejected", "dropped_steps", "gaps")},
}
#: (what is in the file, what is told of it); `None` leaves the file to `change`.
GARBAGE = [
    (b"", r"no JSON at line 1, column 1"),
    (b'{"id": 1,\n "tag": }', r"no JSON at line 2, column 9"),
    (b"[1, 2]", "it holds list, where keys and values belong"),
    (b"null", "it holds NoneType"),
    (b"{}", "the key '[a-z]+' is missing"),
    (b"\xff\xfe{}", "no UTF-8 text at byte 0"),
    (b"[" * 100_000, "nested too deeply to be read"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and no Redis."""
    for variable in ("CLAWQ_BROKER_URL", "CLAWQ_DATA_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    config = RunConfig.model_validate({"name": "t", "environment": {"name": "point"}})
    run = Run("t-1", new_tag(), tmp_path / "t-1", config, SPEC)
    run.folder.mkdir()
    make_folders(run)
    run.save()
    balance = Balance("learner", "at its end", (Row("s", 3, 2, 1, 0),), SUMS, True)
    (run.folder / LEDGER_FILE).write_text(json.dumps(balance.to_json()))
    return run.folder


@pytest.mark.parametrize(("raw", "told"), GARBAGE)
@pytest.mark.parametrize(
    ("name", "read", "kind", "advice"),
    [
        ("run.json", lambda at: open_run(at, None), CheckpointInvalid, "put a copy back"),
        ("run.json", lambda at: find_run(str(at)), UserError, "put a copy back"),
        (LEDGER_FILE, read_ledger, UserError, "Move it away: the books are then taken from the newest checkpoint"),
    ],
)
def test_a_damaged_file_is_told_with_its_place_and_what_to_do(
    folder: Path, name: str, read: Callable[[Path], Any], kind: type[ClawqError], advice: str, raw: bytes, told: str
) -> None:
    read(folder)
    (folder / name).write_bytes(raw)
    with pytest.raises(kind, match=told) as caught:
        read(folder)
    assert str(caught.value).startswith(f"{folder / name} is damaged: ")
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("run.json", "tag", 7, "a run tag is 32 hex digits"),
        ("run.json", "id", "../x", "run name '../x' cannot be used"),
        ("run.json", "config", {"name": "t"}, "environment: Field required"),
        ("run.json", "config", [], "valid dictionary"),
        (
            "run.json",
            "config",
            {"name": "t", "environment": {"name": "point", "old": 1}},
            "old: .* another version of it",
        ),
        ("run.json", "spec", {}, "the key '[a-z_]+' is missing"),
        (LEDGER_FILE, "slots", 3, "not iterable"),
        (LEDGER_FILE, "slots", [{"slot": "s"}], "the key 'acknowledged' is missing"),
        (LEDGER_FILE, "sums", {"entries": 1}, "the key 'committed' is missing"),
        (LEDGER_FILE, "sums", {**SUMS, "entries": "x"}, "invalid literal"),
        (LEDGER_FILE, "sums", {**SUMS, "gaps": 3}, "no attribute 'items'"),
    ],
)
def test_a_wrong_value_is_told_too(folder: Path, name: str, key: str, value: Any, told: str) -> None:
    facts = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**facts, key: value}))
    with pytest.raises(ClawqError, match=told) as caught:
        open_run(folder, None) if name == "run.json" else read_ledger(folder)
    assert str(caught.value).startswith(f"{folder / name} is damaged: ")


def test_a_ledger_comes_back_as_it_was_written(folder: Path) -> None:
    found = read_ledger(folder)
    assert found is not None
    assert (found.rows, found.finished, found.sums) == ((Row("s", 3, 2, 1, 0),), True, SUMS)
    (folder / LEDGER_FILE).unlink()
    assert read_ledger(folder) is None
