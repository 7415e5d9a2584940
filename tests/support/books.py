"""The promise that no experience disappears uncounted, checked from outside against a stopped learner's checkpoint."""

from pathlib import Path
from typing import Any

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
