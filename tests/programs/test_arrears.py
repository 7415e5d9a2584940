"""What only the archive has is learned from too: learner and data Redis died together, over a real Redis."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from desk import Desk, Slot
from waiting import Until, wait_for

from clawq.core import Entry
from clawq.programs.audit import audit_live
from clawq.programs.balance import Balance
from clawq.programs.recording import open_recording
from clawq.programs.rerun import Order, rerun
from clawq.programs.schedule import FragmentCommitted, read_schedule
from clawq.programs.train import Trainer
from clawq.programs.whereabouts import Whereabouts
from clawq.transport import rotation
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.books import Books
from clawq.transport.codec import encode
from clawq.transport.control import delete_run
from clawq.transport.restarts import bear
from clawq.transport.segment_index import segment_paths
from clawq.transport.server import EmbeddedRedis


class Ruin:
    """A desk whose data server comes back empty, and whose archive is what a test puts there."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.run = desk, desk.session.run
        self.run.save()
        self.run.save_config()

    def archive(self, *slots: Slot) -> None:
        """All that these sent, but for what is there."""
        writer = ArchiveWriter(self.run.archive, self.run.tag, ArchiveLimits(compress=False))
        for made in (made for slot in slots for made in slot.sent):
            writer.append(Entry(made.meta.slot, made.meta.epoch, made.meta.seq, bytes(encode(made))))
        writer.close()

    def empty(self) -> None:
        """The server forgets all but the claim, which is the next learner's too."""
        data, keys = self.desk.data, self.desk.keys
        held: Any = data.get(keys.claim("learner"))
        delete_run(data, keys)
        data.set(keys.claim("learner"), held)
        bear(data, keys)

    def balance(self, trainer: Trainer, entries: int) -> Balance:
        """The audit, once the learner has published so much."""
        data, keys = self.desk.data, self.desk.keys

        def is_told() -> bool:
            found = Books(data, keys).read()
            return found is not None and found[1]["entries"] == entries

        trainer.train(Until(is_told))
        found = audit_live(data, keys, settling_s=2.0)
        assert found.problems() == [], found.to_json()
        return found

    def replay(self, trainer: Trainer) -> dict[str, Any]:
        """`clawq replay` of all sessions, once the learner has ended with a checkpoint."""
        trainer.checkpoint(wait=True)
        self.desk.abandon(trainer)
        trainer.parts.recorder.close()
        where = Whereabouts(self.run.id, self.desk.keys, self.run.folder, self.desk.data)
        return rerun(open_recording(where), Order(), Silent(), threading.Event())


class Silent:
    def show(self, snapshot: Any) -> None: ...
    def say(self, text: str) -> None: ...


@pytest.fixture
def ruin(
    tmp_path: Path, redis_servers: EmbeddedRedis, data_client: redis.Redis, broker_client: redis.Redis
) -> Iterator[Ruin]:
    desk = Desk(tmp_path / "r1", redis_servers, data_client, broker_client)
    yield Ruin(desk)
    desk.close()


def assert_each_was_taken_once(trainer: Trainer, *slots: Slot) -> None:
    """All that these sent is in the ring, the counts and the schedule, once and in its order, and nothing else."""
    counts, sent = trainer.parts.consumer.counts, [made for slot in slots for made in slot.sent]
    assert (counts.entries, counts.committed, counts.duplicates) == (len(sent), len(sent), 0)
    assert (counts.rejected, counts.gaps, counts.gap_fragments, counts.unaccounted_steps) == ({}, {}, 0, 0)
    rows = np.concatenate([one.obs["state"][:-1][one.valid] for one in sent]).astype(np.float64)
    seen = trainer.parts.updater.algorithm.state_dict()["normaliser"]
    assert seen["count"] == trainer.parts.intake.env_steps == len(rows)
    np.testing.assert_allclose(seen["mean"].numpy(), rows.mean(0), rtol=1e-6)
    trainer.parts.recorder.mark()
    trainer.parts.recorder.sync()
    records = read_schedule(trainer.parts.recorder.path)
    taken = [(one.slot, one.epoch, one.seq) for one in records if isinstance(one, FragmentCommitted)]
    assert sorted(taken) == sorted((one.meta.slot, one.meta.epoch, one.meta.seq) for one in sent)
    for slot in {one.meta.slot for one in sent}:
        ids = [(epoch, seq) for name, epoch, seq in taken if name == slot]
        assert ids == sorted(ids)


@pytest.mark.parametrize(
    "survives",
    [pytest.param(False, id="redis_empty"), pytest.param(True, id="redis_survived", marks=pytest.mark.slow)],
)
def test_what_was_archived_behind_the_checkpoint_is_learned_from_exactly_once(ruin: Ruin, survives: bool) -> None:
    desk = ruin.desk
    a, trainer = desk.slot("a", 0), desk.trainer()
    a.send(10)
    desk.train(trainer, 10, updates=5)
    trainer.checkpoint(wait=True)
    # Given that more was sent, learned from and archived, also of a slot that came since, when the learner was killed
    b = desk.slot("b", 1)
    b.version = 40
    a.send(7)
    b.send(4)
    desk.train(trainer, 21, updates=trainer.parts.updater.updates + 3)
    desk.abandon(trainer)
    ruin.archive(a, b)
    if not survives:
        ruin.empty()
    # (A writer goes on in its epoch, and goes on counting, until it has noticed.)
    a.send(1)
    b.send(1)
    more = [desk.slot("c", 3)] if survives else [desk.slot("c", 3), desk.slot("a", 2), desk.slot("b", 4)]
    # When it is resumed, and others send
    resumed = desk.trainer(resume=True)
    assert resumed.publishing.version > 40
    for slot in more:
        slot.send(2)
    sent = sum(len(slot.sent) for slot in (a, b, *more))
    desk.train(resumed, sent)
    # Then all was learned from once, the books are exact, and a learner that was never interrupted is the same
    assert_each_was_taken_once(resumed, a, b, *more)
    found = ruin.balance(resumed, sent)
    assert (found.acknowledged, found.earlier) == (sent, 0 if survives else 21)
    desk.train_on(resumed)
    report = ruin.replay(resumed)
    assert (report["mode"], report["difference"]) == ("exact", None)
    assert report["identical_upto"] == report["updates"] == resumed.parts.updater.updates > 8


@pytest.mark.parametrize("lost", [False, True], ids=["redis_lives", "redis_lost_again"])
def test_killed_again_in_their_midst_nothing_is_taken_twice_or_left_out(ruin: Ruin, lost: bool) -> None:
    desk = ruin.desk
    a, b, trainer = desk.slot("a", 0), desk.slot("b", 1), desk.trainer()
    a.send(4)
    desk.train(trainer, 4)
    trainer.checkpoint(wait=True)
    a.send(8)
    b.send(8)
    desk.abandon(trainer)
    ruin.archive(a, b)
    ruin.empty()
    # Given a learner that took over some of it, and has no stream in its checkpoint
    second = desk.trainer(resume=True)
    second.train(Until(lambda: second.parts.consumer.counts.entries >= 9))
    second.parts.consumer.close()
    settled = second.parts.consumer.counts.entries
    second.checkpoint(wait=True)
    desk.abandon(second)
    assert settled >= 9
    # When its Redis lives on, or is lost once more
    if lost:
        ruin.empty()
    third = desk.trainer(resume=True)
    assert third.parts.consumer.counts.entries == settled
    desk.train(third, 20)
    assert_each_was_taken_once(third, a, b)
    assert ruin.balance(third, 20).acknowledged == 20


def test_a_session_that_was_killed_before_its_first_checkpoint_begins_anew_with_its_archive(ruin: Ruin) -> None:
    desk = ruin.desk
    a, trainer = desk.slot("a", 0), desk.trainer()
    a.send(6)
    desk.train(trainer, 6)
    desk.abandon(trainer)
    ruin.archive(a)
    ruin.empty()
    a.send(1)
    again = desk.slot("a", 1)
    again.send(1)
    resumed = desk.trainer(resume=True)
    assert "r1 was stopped before its first checkpoint; it begins anew" in desk.said
    desk.train(resumed, 8)
    assert_each_was_taken_once(resumed, a, again)
    assert (found := ruin.balance(resumed, 8)).acknowledged == 8
    assert found.earlier == 6
    desk.train_on(resumed)
    assert ruin.replay(resumed)["difference"] is None


def test_what_the_archive_has_spoiled_is_a_gap_and_the_rest_is_taken(ruin: Ruin) -> None:
    desk = ruin.desk
    a, trainer = desk.slot("a", 0), desk.trainer()
    a.send(3)
    desk.train(trainer, 3)
    trainer.checkpoint(wait=True)
    a.send(5)
    desk.abandon(trainer)
    ruin.archive(a)
    [path] = segment_paths(ruin.run.archive)
    fragment = bytes(encode(a.sent[5]))
    with path.open("r+b") as file:
        at = file.read().index(fragment)
        file.seek(at + len(fragment) - 1)
        file.write(bytes([fragment[-1] ^ 1]))
    ruin.empty()
    resumed = desk.trainer(resume=True)
    desk.train(resumed, 7)
    counts = resumed.parts.consumer.counts
    assert (counts.committed, counts.gaps, counts.gap_fragments) == (7, {"server_lost": 1}, 0)
    assert (counts.missed_steps, counts.unaccounted_steps) == (20, 0)
    assert ruin.balance(resumed, 7).acknowledged == 8
    assert resumed.parts.consumer.check_valid() == (True, "")


def test_a_server_that_is_lost_while_the_learner_lives_costs_nothing_that_is_archived(
    ruin: Ruin, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that one read brings little
    monkeypatch.setattr(rotation, "_MAX_COUNT", 2)
    desk = ruin.desk
    a, trainer = desk.slot("a", 0), desk.trainer()
    trainer.parts.consumer.hold(1)
    a.send(12)
    ruin.archive(a)
    wait_for(lambda: trainer.parts.consumer.state == "full", "it is held up")
    # Given that most of it is not read yet, when the server comes back empty
    assert trainer.parts.consumer.staged[0] < 3
    ruin.empty()
    trainer.parts.consumer.hold(10**6)
    desk.train(trainer, 12)
    again = desk.slot("a", 1)
    again.send(2)
    desk.train(trainer, 14)
    assert_each_was_taken_once(trainer, a, again)
    assert ruin.balance(trainer, 14).acknowledged == 14
