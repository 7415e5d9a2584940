"""A learner with its archive: every fragment that Redis acknowledged is on disk once, though the learner was killed."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import POINT, Cluster

from clawq.programs.logbook import open_logbook
from clawq.transport.archive import Archive
from clawq.transport.keys import RunKeys
from clawq.transport.log import RunLog
from clawq.transport.segment_index import segment_paths

Eventually = Callable[..., None]
#: Large fragments, and streams that hold few of them: the log is soon larger than what Redis keeps of it.
WORDS = (
    "evaluation.interval_s=null", "evaluation.final_episodes=2", "record.animation=false", "budget={}",
    "environment.num_envs=128", "redis.stream_bytes=1000000", "redis.window_bytes=200000",
    "rate_limit.samples_per_insert=null", "learner.checkpoint_interval_s=1", "archive.enabled=true",
    "archive.segment_bytes=1000000",
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def acknowledged(data: Any, keys: RunKeys) -> dict[str, int]:
    """Slot -> entries that its stream ever took."""
    slots = [name.decode() for name in data.hkeys(keys.slots)]
    return {slot: data.xinfo_stream(keys.stream(slot))["entries-added"] for slot in slots}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_archive_has_every_fragment_once_though_the_learner_is_killed(
    cluster: Cluster, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    clawq, data = cluster.home, cluster.data
    clawq.start("worker", "start", "--slots", "1", "--name", "w")
    first = clawq.start("learner", "start", POINT, f"folder={clawq.runs}", *WORDS, "--run", "r1")
    folder = clawq.runs / "r1"
    eventually(lambda: len(segment_paths(folder / "archive")) >= 4, "four segments", 90)
    keys = cluster.keys("r1")
    # When it is killed, and goes on
    first.process.kill()
    first.wait(5)
    eventually(lambda: not data.exists(keys.claim("learner")), "the claim runs out", 30)
    before = Archive(folder / "archive", keys.tag).entries
    second = clawq.start("learner", "start", str(folder / "config.yaml"), "--resume", str(folder))
    eventually(lambda: Archive(folder / "archive", keys.tag).entries > before + 100, "more of them", 90)
    assert clawq.call("learner", "stop", "r1").status == 0
    assert second.wait(30) == 0, second.output
    # Then the streams hold only the end of the log, and the archive all of it, once
    archive = Archive(folder / "archive", keys.tag)
    archived = {slot: [(f.epoch, f.seq) for f in RunLog(None, archive).find_all([slot])] for slot in archive.slots()}
    counts = acknowledged(data, keys)
    for slot, ids in archived.items():
        assert len(set(ids)) == len(ids)
        for (epoch, seq), (next_epoch, next_seq) in itertools.pairwise(ids):
            assert next_seq == (seq + 1 if epoch == next_epoch else 1)
        # Actors may have sent a few more after the archive was closed
        rest = data.xrange(keys.stream(slot), min=f"({ids[-1][0]}-{ids[-1][1]}")
        assert len(ids) + len(rest) == counts[slot]
        assert data.xlen(keys.stream(slot)) < 0.8 * counts[slot]
    assert archive.check() == []
    # And the log can be read from its folder when Redis is gone
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(clawq.folder / "state"))
    monkeypatch.delenv("CLAWQ_DATA_URL", raising=False)
    monkeypatch.delenv("CLAWQ_BROKER_URL", raising=False)
    book = open_logbook(str(folder))
    assert sum(1 for _ in book.log.entries()) == archive.entries
