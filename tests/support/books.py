"""The promise that no experience disappears uncounted, checked from outside against a stopped learner's checkpoint."""

import json
from pathlib import Path
from typing import Any

from clawq.programs.audit import audit, audit_live, others
from clawq.programs.checkpoint import Checkpoints
from clawq.replay.ledger import Ledger
from clawq.transport.keys import RunKeys


def assert_books_balance(data: Any, keys: RunKeys, folder: Path) -> dict[str, Any]:
    """acknowledged = inserted + still in stream + rejected + duplicates, exactly; returns the checkpoint's counts.

    Args:
        data: client of the data server, which must not have been restarted during the run.
        keys: of the run, whose learner was stopped (and has not finished the run).
        folder: the run folder.
    """
    checkpoint = Checkpoints(folder / "checkpoints").load_latest()
    assert checkpoint is not None
    state = checkpoint.state
    ledger = Ledger(state["consumer"])
    assert ledger.check_valid() == (True, "")
    acknowledged = unread = 0
    for slot in (name.decode() for name in data.hkeys(keys.slots)):
        stream, cursor = keys.stream(slot), ledger.cursors.get(slot)
        # One MULTI: actors may still be sending their last fragments. Redis counts what it ever acknowledged.
        pipe = data.pipeline(transaction=True)
        pipe.xinfo_stream(stream)
        pipe.xrange(stream, min=f"({cursor}" if cursor else "-")
        about, after = pipe.execute()
        acknowledged += about["entries-added"]
        unread += len(after)
    counts = ledger.counts
    settled = counts.committed + sum(counts.rejected.values()) + counts.duplicates
    assert acknowledged == settled + unread, f"{acknowledged} acknowledged, {unread} in the streams, {counts}"
    # Each valid row was shown to the normaliser once, and counts as one env step and one insert
    seen = state["algorithm"]["normaliser"]["count"]
    assert seen == state["env_steps"] == state["limiter"]["inserts"] <= counts.committed_steps
    return {name: getattr(counts, name) for name in counts.__dataclass_fields__}


def assert_ledger_balances(data: Any, keys: RunKeys, folder: Path | None) -> None:
    """What `clawq log ledger` says of all readers of a run, whatever has become of it; without any it is passed over.

    Args:
        data: client of the data server, None if that has ended.
        keys: of the run.
        folder: the run folder; None for a run that has only actors.
    """
    found = audit(data, keys, folder) if folder is not None else audit_live(data, keys, settling_s=0.0)
    for one in ([] if found is None else [found]) + others(data, keys, folder):
        problems = one.problems()
        assert not problems, f"reader {one.reader}: {problems}\n{json.dumps(one.to_json(), indent=1)}"


def assert_every_ledger_balances(data: Any, runs: Path) -> None:
    """The same of every run below a folder."""
    for described in sorted(runs.glob("*/run.json")):
        assert_ledger_balances(data, RunKeys(json.loads(described.read_text())["tag"]), described.parent)
