"""The learner's archive: opened as configured, refused in words, and waited for by trimming."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from disks import fill, small_disk
from room import Room

from clawq.config import RunConfig
from clawq.core import Control, Entry
from clawq.errors import UserError
from clawq.programs.archiving import open_archiver, open_log
from clawq.programs.audit import audit_live
from clawq.programs.link import Link, Wires
from clawq.programs.run import Run
from clawq.testing.experience import SPEC
from clawq.transport import archive_writer
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.segment_index import segment_paths
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter


def made_run(at: Path, keys: RunKeys, **archive: Any) -> Run:
    config = RunConfig.model_validate({"name": "t", "environment": {"name": "point"}, "archive": archive})
    at.mkdir(exist_ok=True)
    return Run("t-1", keys.tag, at, config, SPEC)


def test_there_is_no_archive_unless_it_is_wanted(tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys) -> None:
    assert open_archiver(made_run(tmp_path, run_keys), data_client, print) is None
    assert list(tmp_path.iterdir()) == []


def test_it_stands_in_the_run_folder_or_where_the_configuration_says(
    tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys
) -> None:
    for run, place in (
        (made_run(tmp_path / "a", run_keys, enabled=True), tmp_path / "a" / "archive"),
        (made_run(tmp_path / "b", run_keys, enabled=True, folder=str(tmp_path / "big")), tmp_path / "big" / "t-1"),
    ):
        archiver = open_archiver(run, data_client, print)
        assert archiver is not None
        archiver.close()
        assert len(segment_paths(place)) == 1
        assert list(open_log(run, None).entries()) == []


def test_a_folder_that_cannot_be_used_is_a_mistake_told_at_the_start(
    tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys
) -> None:
    (tmp_path / "file").write_text("no folder")
    run = made_run(tmp_path / "run", run_keys, enabled=True, folder=str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written: .*archive\.folder=PATH"):
        open_archiver(run, data_client, print)
    ArchiveWriter(tmp_path / "run" / "archive", "f" * 32, ArchiveLimits()).close()
    with pytest.raises(UserError, match=r"is of the run with tag f{32}.*archive\.folder=PATH"):
        open_archiver(made_run(tmp_path / "run", run_keys, enabled=True), data_client, print)


def test_what_a_crash_cost_is_said(tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys) -> None:
    run, said = made_run(tmp_path, run_keys, enabled=True), list[str]()
    writer = ArchiveWriter(run.archive, run.tag, ArchiveLimits())
    writer.append(Entry("w-0", 1, 1, b"whole"))
    writer.close()
    with segment_paths(run.archive)[0].open("ab") as file:
        file.write(b"CLQR and no more")
    archiver = open_archiver(run, data_client, said.append)
    assert archiver is not None
    assert said == ["archive: segment-000000000001.clq: a torn end of 16 bytes was cut off"]
    # And trimming waits for it: what the learner has checkpointed is kept until it is archived too
    nothing = cast(Any, None)
    wires = Wires(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, archiver=archiver)
    link = Link(wires, Control(0, False, 1, 1), 1_000_000)
    link.checkpointed({"w-0": "1-9", "w-1": "1-5"})
    assert link._beside() == {"archive": {"w-0": "1-1"}}
    archiver.close()


def test_nobody_waits_for_the_archive_of_a_run_that_is_resumed_without_one(
    tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys
) -> None:
    learner = StreamReader(data_client, run_keys)
    archiver = open_archiver(made_run(tmp_path, run_keys, enabled=True, on_full="block"), data_client, print)
    assert archiver is not None
    archiver.start().close()
    learner.read(0.1)
    readers = Readers(data_client, run_keys)
    assert list(readers.kept_by_required("learner")) == ["archive"]
    assert open_archiver(made_run(tmp_path, run_keys, enabled=False), data_client, print) is None
    assert readers.kept_by_required("learner") == {}
    assert data_client.hget(run_keys.control, "required") == b"learner"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_required_archive_on_a_full_disk_is_told_loses_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path,
    redis_servers: EmbeddedRedis,
    data_client: redis.Redis,
    broker_client: redis.Redis,
    eventually: Any,
) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        room = Room(
            tmp_path / "run",
            redis_servers,
            data_client,
            broker_client,
            environment={"name": "point", "num_envs": 64},
            actors={"fragment_s": 0.05, "fragment_bytes": 30_000},
            rate_limit={"samples_per_insert": None, "min_size_to_sample": 10**6},
            replay={"capacity": 100_000},
            learner={"checkpoint_interval_s": 0.5},
            redis={"stream_bytes": 1_000_000, "window_bytes": 100_000},
            archive={"enabled": True, "on_full": "block", "folder": str(disk), "compression": "none"},
        )
        archiver = open_archiver(room.run, data_client, print)
        assert archiver is not None
        ballast = fill(disk)
        trainer = room.trainer(archiver=archiver)
        archiver.start()
        ending = threading.Event()
        loop = threading.Thread(target=trainer.train, args=(ending,))
        loop.start()
        try:
            room.actor("a")
            # When the disk is full, that is told with what follows and what to do, where people look
            eventually(lambda: "No space left on device" in (trainer.parts.link.note or ""), "it is told", 60)
            assert "actors wait when these are full" in str(trainer.parts.link.note)
            assert "Make room there" in str(trainer.parts.link.note)
            # Then actors stop at what the streams may hold, and the run goes on
            stream = room.keys.stream("a")
            eventually(lambda: stands_still(data_client, stream), "the actor waits", 60)
            entries: Any = data_client.xrange(stream)
            assert 60_000 < sum(len(fields[b"f"]) for _, fields in entries) <= 1_000_000
            assert trainer.parts.link.failure is None
            before = int(data_client.xinfo_stream(stream)["entries-added"])
            # When there is room again, everything goes on by itself
            ballast.unlink()
            eventually(lambda: archiver.trouble is None, "the archive is written again", 60)
            eventually(lambda: int(data_client.xinfo_stream(stream)["entries-added"]) > before + 20, "it flows", 60)
        finally:
            ending.set()
            loop.join()
            room.actors[0].end()
            archiver.close(20.0)
            room.close_learners()
        # And nothing is lost: every entry that was acknowledged is in the archive, once
        found = [(entry.epoch, entry.seq) for entry in open_log(room.run, None).entries()]
        assert len(found) == len(set(found)) == int(data_client.xinfo_stream(stream)["entries-added"])
        assert archiver.metrics()["archive/gap_fragments"] == 0
        room.close()


def stands_still(client: Any, stream: str, seconds: float = 1.0) -> bool:
    """Whether nothing is added to a stream for so long."""
    before = client.xinfo_stream(stream)["entries-added"]
    return not threading.Event().wait(seconds) and client.xinfo_stream(stream)["entries-added"] == before


def test_an_actor_does_not_wait_for_the_disk_of_a_required_archive(
    tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(archive_writer, "SYNC_S", 60.0)
    archiver = open_archiver(made_run(tmp_path, run_keys, enabled=True, on_full="block"), data_client, print)
    assert archiver is not None
    archiver.start()
    sender = StreamWriter.open(data_client, run_keys, "w-0", "host")
    sender.send(1, b"one")
    taken, kept = run_keys.cursors("archive"), run_keys.kept("archive")
    eventually(lambda: data_client.hget(taken, "w-0") == f"{sender.epoch}-1".encode(), "it was taken over")
    # It is trimmed, and counted, only behind what is on the disk for sure.
    found = audit_live(data_client, run_keys, "archive", settling_s=0.0)
    assert (found.sums["committed"], found.in_stream) == (0, 1)
    assert data_client.hget(kept, "w-0") is None
    assert archiver.holds() == {}
    archiver.close()
    assert data_client.hget(kept, "w-0") == f"{sender.epoch}-1".encode()


def test_the_archive_has_an_exact_ledger_also_after_a_kill_that_published_less_than_was_written(
    tmp_path: Path, data_client: redis.Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(archive_writer, "SYNC_S", 0.0)
    run = made_run(tmp_path, run_keys, enabled=True, on_full="block")
    gone, stays = (StreamWriter.open(data_client, run_keys, slot, "w") for slot in ("gone", "stays"))
    learner = StreamReader(data_client, run_keys)

    def send(writer: StreamWriter, first: int, last: int) -> None:
        for seq in range(first, last + 1):
            writer.send(seq, b"x")

    def balance() -> tuple[int, int, int]:
        found = audit_live(data_client, run_keys, "archive", settling_s=0.0)
        assert found.problems() == [], found.to_json()
        return found.acknowledged, found.sums.get("committed", 0), found.in_stream

    send(gone, 1, 3)
    send(stays, 1, 2)
    archiver = open_archiver(run, data_client, print)
    assert archiver is not None
    archiver.start()
    eventually(lambda: balance() == (5, 5, 0), "all is archived, and told")
    # One slot goes, behind what is archived
    gone.close()
    eventually(lambda: archiver.holds() == {"gone": f"{gone.epoch}-3", "stays": f"{stays.epoch}-2"}, "it is on disk")
    while learner.cursors() != archiver.holds():
        learner.read(0.1)
    eventually(
        lambda: learner.trim(learner.cursors(), 0) >= 0 and not data_client.xlen(run_keys.stream("gone")), "trimmed"
    )
    assert learner.sweep() == ["gone"]
    assert balance() == (5, 5, 0)
    eventually(lambda: list(archiver.holds() or {}) == ["stays"], "what is gone is not kept for ever")
    told = data_client.hgetall(run_keys.ledger("archive"))
    send(stays, 3, 6)
    eventually(lambda: balance() == (9, 9, 0), "it goes on")
    archiver.close()
    # What it had written last was not published when it was killed; and two more came while it was away
    data_client.delete(run_keys.ledger("archive"))
    data_client.hset(run_keys.ledger("archive"), mapping=told)  # type: ignore[arg-type]
    send(stays, 7, 8)
    assert balance() == (11, 5, 6)
    again = open_archiver(run, data_client, print)
    assert again is not None
    again.start()
    eventually(lambda: balance() == (11, 11, 0), "each is counted once")
    again.close()
    stays.close()
    # Another archive of the same run begins anew
    elsewhere = made_run(tmp_path / "other", run_keys, enabled=True)
    other = open_archiver(elsewhere, data_client, print)
    assert other is not None
    other.start()
    left = int(data_client.xlen(run_keys.stream("stays")))
    eventually(lambda: balance() == (11, left, 0), "it balances, too")
    other.close()
