"""Learner and actors by rounds, over a real Redis: the same weights bit for bit, and what happens when actors fail."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from room import Room, digest
from waiting import Until

from clawq import plugins
from clawq.config import RunConfig
from clawq.errors import NoSeat, StoreUnavailable, UserError
from clawq.programs import acting
from clawq.programs.parent import LeaseOrder
from clawq.programs.round_size import check_round
from clawq.programs.tempo import ByRounds
from clawq.programs.train import Trainer
from clawq.replay.rounds import Rounds
from clawq.testing.experience import SPEC
from clawq.transport.client import connect
from clawq.transport.codec import decode
from clawq.transport.control import ControlRecord, Events
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.types import FragmentMeta

Eventually = Callable[..., None]
MakeRoom = Callable[..., Room]
#: Rounds of 2 actors · 4 envs · 6 steps = 48 env steps.
SYNC: dict[str, Any] = {"actors": 2, "quota_steps": 6, "fragment_steps": 4}
ROUND = 48
SEATS = ("seat-000", "seat-001")


def rounds_of(trainer: Trainer) -> Rounds:
    tempo = trainer.parts.tempo
    assert isinstance(tempo, ByRounds)
    return tempo.rounds


def train_rounds(trainer: Trainer, more: int) -> None:
    """Until so many more rounds are closed and trained on."""
    rounds = rounds_of(trainer)
    enough = rounds.closed + more
    trainer.train(Until(lambda: rounds.closed >= enough and trainer.parts.tempo.settled))


def sent(room: Room) -> list[FragmentMeta]:
    """Headers of all fragments in the streams, those of a seat in order."""
    reader, metas = StreamReader(room.data, room.keys), []
    while entries := reader.read(0.5):
        metas += [decode(entry.payload).meta for entry in entries]
    return sorted(metas, key=lambda meta: (meta.slot, meta.epoch, meta.seq))


def assert_updates_are_exact(trainer: Trainer) -> None:
    """As many as the env steps of the closed rounds call for, and not one more."""
    parts, limit = trainer.parts, trainer.parts.config.rate_limit
    assert limit.samples_per_insert is not None
    due = max(0, parts.intake.env_steps - limit.min_size_to_sample) * limit.samples_per_insert
    assert parts.updater.updates == due // parts.config.replay.batch_size


@pytest.mark.parametrize("lag", [0, 1])
def test_two_runs_of_one_seed_end_with_the_same_weights_bit_for_bit(make_room: MakeRoom, lag: int) -> None:
    steps = 8 * ROUND
    found = []
    # Given two runs whose workers, slots, speeds and leases differ in every way
    for slots, pauses in (
        ({"host-a-0": 0.05, "host-a-1": 0.3}, ((0.0, 0.004), ())),
        ({"other-b-7": 0.4, "x": 0.03, "y": 0.1}, ((), (0.001,), (0.01, 0.0, 0.0))),
    ):
        room = make_room(sync={**SYNC, "deterministic_lag": lag}, budget={"env_steps": steps})
        for (slot, lease_s), pauses_s in zip(slots.items(), pauses, strict=False):
            room.actor(slot, lease_s, pauses_s)
        trainer = room.trainer()
        trainer.train(Until(lambda: False))
        # Then rounds are whole and in step with the versions, and the data is exactly `lag` versions old
        assert trainer.parts.intake.env_steps == steps
        assert trainer.publishing.version == 8 + lag
        assert_updates_are_exact(trainer)
        numbers = trainer.numbers()
        assert (numbers["policy_lag/min"], numbers["policy_lag/max"]) == (lag, lag)
        assert (numbers["rounds"], numbers["short_rounds"], numbers["late_fragments"]) == (8, 0, 0)
        assert numbers["replaced_actors"] == 0
        found.append((digest(trainer), trainer.parts.updater.updates))
    # And both end alike
    assert found[0] == found[1]


def test_another_seed_ends_with_other_weights(make_room: MakeRoom) -> None:
    found = []
    for seed in (7, 8):
        room = make_room(sync=SYNC, seed=seed, budget={"env_steps": 3 * ROUND})
        room.actor("a")
        room.actor("b")
        trainer = room.trainer()
        trainer.train(Until(lambda: False))
        found.append(digest(trainer))
    assert found[0] != found[1]


def test_every_actor_sends_the_same_quota_under_each_version_whatever_its_leases(make_room: MakeRoom) -> None:
    room = make_room(sync=SYNC, budget={"env_steps": 5 * ROUND})
    room.actor("a", lease_s=0.01, pauses_s=(0.003,))
    room.actor("b", lease_s=5.0)
    trainer = room.trainer()
    trainer.train(Until(lambda: False))
    shapes = {seat: [(m.weights_version, m.steps) for m in sent(room) if m.slot == seat] for seat in SEATS}
    for seat in SEATS:
        assert shapes[seat][:10] == [(version, steps) for version in range(1, 6) for steps in (4, 2)]


def test_an_actor_too_many_stands_by_and_takes_over_the_seat_of_one_that_leaves(make_room: MakeRoom) -> None:
    room = make_room(sync=SYNC)
    first, second = room.actor("a"), room.actor("b")
    trainer = room.trainer()
    rounds = rounds_of(trainer)
    train_rounds(trainer, 2)
    spare = room.actor("c")
    trainer.train(Until(lambda: "no_seat" in spare.reasons))
    assert not {"no_seat"} & {*first.reasons, *second.reasons}
    # When one leaves in the midst of a round
    first.end()
    train_rounds(trainer, 3)
    # Then the spare one has its seat, under a new epoch and with a new seed, which is on record
    metas = sent(room)
    lives = {(m.slot, m.epoch): m.seed for m in metas}
    assert len(lives) == 3
    assert len({*lives.values()}) == 3
    assert rounds.replaced == 1
    # And nothing of what either sent is lost
    assert rounds.short == 0
    counts = trainer.parts.consumer.counts
    assert counts.unaccounted_steps == counts.gap_fragments == counts.duplicates == 0
    assert_updates_are_exact(trainer)


@pytest.mark.parametrize("stopped", [True, False])
def test_an_actor_that_stands_by_ends_with_its_lease_or_its_run_though_redis_is_away(
    make_room: MakeRoom, stopped: bool
) -> None:
    room, looks = make_room(sync=SYNC), count()
    described = {"tag": room.keys.tag, "config": room.run.config.model_dump(mode="json")}
    order = LeaseOrder(described, "a", "test", room.data_url, 0.5 if stopped else 60.0)

    class Away:
        def read(self) -> None:
            raise StoreUnavailable("away")

    def no_redis() -> None:
        raise StoreUnavailable("away")

    over = acting._lease_over(order, Away(), lambda: not stopped and next(looks) > 2)  # type: ignore[arg-type]
    with pytest.raises(NoSeat):
        acting._seated(no_redis, over, lambda phase, steps: None, 2)  # type: ignore[arg-type]
    # And where Redis is there, the stop flag ends it too
    control = ControlRecord(room.data, room.keys)
    over = acting._lease_over(replace(order, seconds=60.0), control, lambda: False)
    assert not over()
    control.write(stop=True, window_bytes=1, config_epoch=1)
    assert over()


def test_without_an_actor_the_round_says_who_is_missing_and_goes_on_with_a_quorum_after_the_deadline(
    make_room: MakeRoom,
) -> None:
    room = make_room(sync={**SYNC, "deadline_s": 0.3, "quorum": 0.5})
    room.actor("a")
    trainer = room.trainer()
    rounds = rounds_of(trainer)
    # Then the round closes with the half that is there, again and again; and it is told
    trainer.train(Until(lambda: rounds.short >= 3 and trainer.parts.updater.updates > 0))
    assert rounds.closed == rounds.short
    assert "goes on without seat-001 (0 of 6 steps)" in trainer.notices.recent
    train_rounds(trainer, 1)
    assert "waiting for" in trainer.parts.tempo.texts()["round"]
    # When the second joins, it takes part in the next round, and rounds are whole
    room.actor("b")
    trainer.train(Until(lambda: rounds.closed >= rounds.short + 3))
    assert_updates_are_exact(trainer)


def test_a_round_that_waits_for_too_long_is_told_and_called_again(make_room: MakeRoom, eventually: Eventually) -> None:
    room = make_room(sync=SYNC, rate_limit={"timeout_s": 0.5})
    room.actor("a")
    trainer = room.trainer()
    rounds = rounds_of(trainer)
    trainer.train(Until(lambda: trainer.publishing.version >= 3))
    assert rounds.closed == 0
    assert "waited" in trainer.notices.recent
    assert "seat-001 (0 of 6 steps)" in trainer.notices.recent
    eventually(lambda: "round_timeout" in {event.kind for event in Events(room.data, room.keys).read()}, "the event")
    # When the other comes, what was collected under the older versions is used too
    room.actor("b")
    train_rounds(trainer, 1)
    assert rounds.late > 0
    assert trainer.parts.consumer.counts.rejected == {}


def test_a_resumed_learner_republishes_and_the_actors_go_on_with_the_new_version(make_room: MakeRoom) -> None:
    room = make_room(sync=SYNC)
    room.actor("a")
    room.actor("b")
    first = room.trainer()
    train_rounds(first, 3)
    first.checkpoint(wait=True)
    saved = first.state.state_dict()
    # Given that it goes on after its checkpoint, and is killed
    train_rounds(first, 2)
    room.abandon(first)
    # When it is resumed, it is where the checkpoint was, and its version is above all that were published
    second = room.trainer(resume=True)
    assert second.parts.updater.updates == saved["updates"]
    assert second.parts.limiter.state_dict() == saved["limiter"]
    assert second.publishing.version > first.publishing.version
    assert rounds_of(second).closed == saved["rounds"]["closed"]
    train_rounds(second, 4)
    # Then nothing was lost or taken twice, and the ratio is exact
    counts = second.parts.consumer.counts
    assert counts.unaccounted_steps == counts.gap_fragments == counts.duplicates == 0
    assert rounds_of(second).late > 0
    assert_updates_are_exact(second)
    assert second.parts.ring.size == second.parts.intake.env_steps == second.parts.limiter.inserts


def test_a_round_whose_fragments_went_away_with_redis_is_called_again_at_once(
    tmp_path: Path, own_servers: EmbeddedRedis, restart_data: Callable[[EmbeddedRedis], None]
) -> None:
    data, broker = connect(own_servers.data_url), connect(own_servers.broker_url)
    room = Room(tmp_path / "room", own_servers, data, broker, sync=SYNC)
    try:
        room.session.claim.ttl_s = 3.0
        room.actor("a", pauses_s=(0.01,))
        room.actor("b")
        trainer = room.trainer()
        train_rounds(trainer, 2)
        version = trainer.publishing.version
        # When the data server loses everything, and nobody would be patient enough for a timeout
        restart_data(own_servers)
        train_rounds(trainer, 3)
        assert trainer.publishing.version > version + 3
        assert_updates_are_exact(trainer)
    finally:
        room.close()
        data.close()
        broker.close()


def test_a_round_is_committed_whole_before_its_updates_and_checkpoints_are_made_between_rounds(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given rounds of more fragments than are committed at a time
    sync = {**SYNC, "fragment_steps": 2}
    room = make_room(sync=sync, learner={"checkpoint_interval_s": 0.001}, budget={"env_steps": 6 * ROUND})
    room.actor("a")
    room.actor("b")
    trainer = room.trainer()
    steps: list[int] = []
    at_updates: list[int] = []
    update = trainer.parts.updater.update

    def noted(batch: Any, progress: float) -> bool:
        at_updates.append(trainer.parts.intake.env_steps)
        return update(batch, progress)

    monkeypatch.setattr(trainer.parts.updater, "update", noted)
    monkeypatch.setattr(trainer.safekeeping.saver, "save", lambda snapshot: steps.append(snapshot.state["env_steps"]))
    trainer.train(Until(lambda: False))
    assert len({*steps}) > 3
    assert {count % ROUND for count in steps} == {0}
    assert {*at_updates} == {ROUND * index for index in range(1, 7)}


@pytest.mark.parametrize("algorithm", plugins.names("algorithms"))
@pytest.mark.parametrize("mode", ["sync", "lag 1", "async", "multi-worker"])
def test_C4_every_algorithm_can_be_built_in_every_mode_and_makes_updates(
    make_room: MakeRoom, algorithm: str, mode: str
) -> None:
    sections: dict[str, Any] = {"algorithm": {"name": algorithm}}
    if mode in ("sync", "lag 1"):
        sections["sync"] = {**SYNC, "deterministic_lag": int(mode == "lag 1")}
    room = make_room(**sections)
    for index in range(1 if mode == "async" else 2):
        room.actor(f"host-w{index}-0")
    trainer = room.trainer()
    trainer.train(Until(lambda: trainer.parts.updater.updates >= 3))
    assert trainer.parts.updater.skipped == 0


def test_C54_seeds_are_different_everywhere_the_same_in_a_rerun_and_new_after_a_restart(make_room: MakeRoom) -> None:
    def first_chunks(room: Room) -> dict[str, Any]:
        """Of each seat the first observations [4, 2] and actions of its first fragment."""
        reader, found = StreamReader(room.data, room.keys), {}
        while entries := reader.read(0.5):
            for entry in entries:
                fragment = decode(entry.payload)
                if entry.seq == 1:
                    found[entry.slot, entry.epoch] = fragment
        return {
            f"{slot} {'later' if fragment.meta.epoch > min(e for s, e in found if s == slot) else ''}": fragment
            for (slot, _), fragment in found.items()
        }

    runs = []
    for hosts in ("one", "two"):
        room = make_room(seed=7, sync={"actors": 8, "quota_steps": 6})
        trainer = room.trainer()
        actors = [room.actor(f"{hosts}-w{index}-0") for index in range(8)]
        train_rounds(trainer, 1)
        if hosts == "two":
            # Worker 3 is restarted; some seat is free then, and it takes that
            actors[3].end()
            room.actor("two-w3-0")
            train_rounds(trainer, 2)
        runs.append(first_chunks(room))
    one, two = runs
    [later] = [name for name in two if "later" in name]
    assert set(one) == set(two) - {later}
    for name, fragment in one.items():
        assert fragment.meta.seed == two[name].meta.seed
        for key, column in fragment.obs.items():
            assert (column == two[name].obs[key]).all()
        assert (fragment.action == two[name].action).all()
    starts = {tuple(row) for fragment in one.values() for row in fragment.obs["desired_goal"][0]}
    assert len(starts) == 32
    restarted = two[later]
    assert restarted.meta.seed not in {fragment.meta.seed for fragment in one.values()}
    assert not {tuple(row) for row in restarted.obs["desired_goal"][0]} & starts


def rounds_of_bytes(window_bytes: int, quota_steps: int, **sync: Any) -> RunConfig:
    raw = {
        "name": "t",
        "environment": {"name": "point", "num_envs": 64},
        "sync": {"actors": 2, "quota_steps": quota_steps, **sync},
        "redis": {"window_bytes": window_bytes},
    }
    return RunConfig.model_validate(raw)


@pytest.mark.parametrize("window_bytes", [65_536, 200_000, 1_000_000])
def test_a_round_that_the_streams_cannot_hold_is_refused_with_the_largest_that_fits(window_bytes: int) -> None:
    with pytest.raises(UserError, match="its actors would wait for ever for room") as caught:
        check_round(rounds_of_bytes(window_bytes, 10**6), SPEC, 1_000_000)
    found = re.search(r"At most sync\.quota_steps=(\d+)", str(caught.value))
    assert found is not None
    check_round(rounds_of_bytes(window_bytes, int(found[1])), SPEC, 1_000_000)
    with pytest.raises(UserError, match=f"quota_steps={found[1]};"):
        check_round(rounds_of_bytes(window_bytes, int(found[1]) + 1), SPEC, 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lag", [0, 1])
def test_the_largest_round_that_is_allowed_never_hangs_whichever_seat_is_fast(make_room: MakeRoom, lag: int) -> None:
    # Given a budget of 1 MB, and the largest quota that is allowed for it
    def sections(quota_steps: int) -> dict[str, Any]:
        return {
            "environment": {"name": "point", "num_envs": 64},
            "sync": {"actors": 2, "quota_steps": quota_steps, "fragment_steps": 10, "deterministic_lag": lag},
            "redis": {"window_bytes": 100_000, "stream_bytes": 1_000_000},
            "replay": {"capacity": 200_000, "batch_size": 16},
            "rate_limit": {"samples_per_insert": 0.01, "timeout_s": 60},
        }

    with pytest.raises(UserError, match="At most") as caught:
        make_room(**sections(1000)).trainer()
    found = re.search(r"At most sync\.quota_steps=(\d+)", str(caught.value))
    assert found is not None
    room = make_room(**sections(int(found[1])))
    # When one seat is much faster than the other
    room.actor("a")
    room.actor("b", pauses_s=(0.02,))
    trainer = room.trainer()
    # Then three rounds are whole
    train_rounds(trainer, 3)
    assert rounds_of(trainer).short == 0
    assert trainer.parts.consumer.counts.rejected == {}
