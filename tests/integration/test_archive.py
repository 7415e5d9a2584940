"""A learner with its archive: every fragment that Redis acknowledged is on disk once, though the learner was killed."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import POINT, Cluster

from clawq.programs.checkpoint import Checkpoints
from clawq.programs.logbook import open_logbook
from clawq.programs.schedule import SCHEDULE_FILE, FragmentCommitted, read_schedule
from clawq.replay.ledger import Ledger
from clawq.transport.archive import Archive
from clawq.transport.keys import RunKeys
from clawq.transport.log import RunLog
from clawq.transport.segment_index import segment_paths
from clawq.transport.server import EmbeddedRedis

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


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("survives", [False, True], ids=["redis_died_too", "redis_survived"])
def test_a_learner_that_was_killed_goes_on_with_what_its_archive_has_behind_its_checkpoint(
    cluster: Cluster, eventually: Eventually, restart_data: Callable[[EmbeddedRedis], None], survives: bool
) -> None:
    clawq = cluster.home
    clawq.start("worker", "start", "--slots", "1", "--name", "early")
    words = (
        "evaluation.interval_s=null", "record.animation=false", "budget={}", "learner.device=cpu",
        "learner.checkpoint_interval_s=1", "archive.enabled=true",
    )  # fmt: skip
    first = clawq.start("learner", "start", POINT, f"folder={clawq.runs}", *words, "--run", "r1")
    folder = clawq.runs / "r1"
    checkpoints = Checkpoints(folder / "checkpoints")
    eventually(lambda: cluster.number("r1", "updates") > 5 and checkpoints.paths(), "updates and a checkpoint", 90)
    assert clawq.call("tune", "r1", "learner.checkpoint_interval_s=3600").status == 0
    eventually(lambda: "checkpoint_interval_s: 3600" in (folder / "config.yaml").read_text(), "it is changed", 20)
    known = Ledger(checkpoint_of(folder)["consumer"])
    # Given that much comes after the last checkpoint, also from a slot that it does not know
    clawq.start("worker", "start", "--slots", "1", "--name", "late")

    def behind() -> dict[str, list[tuple[int, int]]]:
        archive = Archive(folder / "archive", cluster.keys("r1").tag)
        found = {slot: archive.records(slot, known.marks.newest(slot)) for slot in archive.slots()}
        return {slot: [(one.record.epoch, one.record.seq) for one in records] for slot, records in found.items()}

    eventually(lambda: len(behind()) == 2 and min(map(len, behind().values())) >= 5, "both slots are archived", 90)
    # When the learner is killed, and with it the data Redis
    first.process.kill()
    first.wait(5)
    if survives:
        eventually(lambda: not cluster.data.exists(cluster.keys("r1").claim("learner")), "the claim runs out", 30)
    else:
        restart_data(cluster.servers)
    assert Ledger(checkpoint_of(folder)["consumer"]).counts == known.counts
    owed = {(slot, *one) for slot, found in behind().items() for one in found}
    told = len(clawq.metrics("r1"))
    second = clawq.start("learner", "start", str(folder / "config.yaml"), "--resume", str(folder))

    def taken() -> float:
        return max([line.get("fragments", 0.0) for line in clawq.metrics("r1")[told:]], default=0.0)

    eventually(lambda: taken() > len(owed), "all that and more", 150)
    assert clawq.call("learner", "stop", "r1").status == 0
    assert second.wait(60) == 0, second.output
    # Then each of them was learned from once, in the session that went on
    state = checkpoint_of(folder)
    records = list(read_schedule(folder / SCHEDULE_FILE))
    committed = [(one.slot, one.epoch, one.seq) for one in records if isinstance(one, FragmentCommitted)]
    assert len(committed) == len(set(committed))
    assert owed <= set(committed)
    counts = Ledger(state["consumer"]).counts
    assert (counts.committed, counts.duplicates, counts.gaps) == (len(committed), 0, {})
    # The books are exact, and the run can be learned again to the last bit
    ledger = clawq.call("log", "ledger", "r1")
    assert ledger.status == 0, ledger.output
    assert "balances" in ledger.output
    again = clawq.call("replay", str(folder), "--run", "again", timeout_s=300)
    assert again.status == 0, again.output
    assert f"identical up to update {state['updates']}" in again.output


def checkpoint_of(folder: Path) -> Mapping[str, Any]:
    """The state in the newest checkpoint."""
    loaded = Checkpoints(folder / "checkpoints").load_latest()
    assert loaded is not None
    return loaded.state
