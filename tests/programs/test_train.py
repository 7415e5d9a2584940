"""The learner's parts together, over a real Redis and known experience: books, checkpoints, trimming, resume."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
import watching
from books import assert_ledger_balances
from checked import checked
from desk import ENVS, STEPS, Desk, Slot
from stitched import stitch
from waiting import Until

from clawq import progress
from clawq.algorithms.td3_learner import Td3
from clawq.config import Demonstrations, Fifo, Hindsight, Sequence
from clawq.core import Entry
from clawq.errors import CheckpointInvalid, UserError
from clawq.programs import learner, learning, quarantine
from clawq.programs.audit import audit, audit_live
from clawq.programs.checkpoint import read_header
from clawq.programs.episode_hdf5 import Hdf5Writer
from clawq.programs.parts import Outside, make_examiner, make_parts
from clawq.programs.safekeeping import CHECKPOINT_SHARE
from clawq.programs.schedule import SCHEDULE_FILE, SessionBegun, read_schedule
from clawq.programs.train import Trainer
from clawq.replay.prioritized import PrioritizedSampler
from clawq.replay.ring import ReplayRing
from clawq.replay.snapshot import load_manifest, row_columns
from clawq.testing.experience import SPEC, Chances, TrueSlot
from clawq.transport.codec import encode
from clawq.transport.control import Events, Orders
from clawq.transport.dead_letters import DeadLetters
from clawq.transport.server import EmbeddedRedis

Eventually = Callable[..., None]


@pytest.fixture
def everything_is_checked() -> Iterator[None]:
    """Ring, samplers, sum tree, limiter and staging: `check_valid()` after each change."""
    with checked():
        yield


@pytest.fixture
def desk(
    tmp_path: Path, redis_servers: EmbeddedRedis, data_client: redis.Redis, broker_client: redis.Redis
) -> Iterator[Desk]:
    desk = Desk(tmp_path, redis_servers, data_client, broker_client)
    yield desk
    desk.close()


def valid_rows(*slots: Slot) -> Any:
    """The observations of all valid env steps that were sent: [R, 3]."""
    return np.concatenate([one.obs["state"][:-1][one.valid] for slot in slots for one in slot.sent]).astype(np.float64)


def assert_normaliser_saw(trainer: Trainer, rows: Any) -> None:
    """Each of these rows once, and nothing else (C49)."""
    seen = trainer.parts.updater.algorithm.state_dict()["normaliser"]
    assert seen["count"] == len(rows)
    np.testing.assert_allclose(seen["mean"].numpy(), rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(seen["var"].numpy(), rows.var(0), rtol=1e-6)


def assert_limiter_is_exact(trainer: Trainer) -> None:
    """It knows of every insert and of every sample, and updates went on until it said no."""
    limiter = trainer.parts.limiter
    assert limiter.inserts == trainer.parts.intake.env_steps
    assert limiter.samples == trainer.parts.updater.updates * trainer.parts.config.replay.batch_size
    low, _ = limiter.bounds
    # As many updates as the inserts call for, and not one more.
    assert low <= limiter.error < low + trainer.parts.config.replay.batch_size


def test_everything_that_actors_made_is_told_under_its_name(desk: Desk) -> None:
    a, b = desk.slot("a", 1), desk.slot("b", 2)
    a.send(4)
    a.lose()
    a.send(2)
    b.send(2)
    b.drop()
    b.send(1)
    b.spoil()
    b.send(3)
    trainer = desk.trainer()
    desk.train(trainer, entries=13)
    numbers = trainer.numbers()
    assert_ledger_balances(desk.data, desk.keys, desk.session.run.folder)
    fragment = STEPS * ENVS
    # acknowledged = inserted + still in stream + rejected + gap; here everything was read
    assert desk.in_streams() == 13 == numbers["fragments"] + numbers["rejected/corrupt"]
    assert numbers["rejected/corrupt"] == 1
    assert numbers["gap_fragments"] == 2
    assert numbers["env_steps"] == len(valid_rows(a, b))
    # And of the steps, the lost and the spoilt fragment are not passed over in silence
    assert numbers["produced_steps"] == 15 * fragment
    assert numbers["drops/outbox_full"] == fragment
    assert numbers["drops/unaccounted"] == 2 * fragment
    assert_normaliser_saw(trainer, valid_rows(a, b))
    desk.train_on(trainer)
    assert_limiter_is_exact(trainer)


def test_its_loop_is_shown_before_the_very_first_update_which_may_hang_already(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "mine.progress"
    progress.create(shown)
    monkeypatch.setattr(progress, "_mine", progress.Progress.open(shown))
    trainer = desk.trainer()
    trainer.train(Until(lambda: True))
    reading = progress.read(shown)
    assert reading is not None
    assert reading.phase == "step"


def test_the_ledger_balances_at_any_moment_and_names_what_somebody_took_out_of_a_stream(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    # Given a learner whose ring takes only some of what was sent, and streams that are trimmed and swept meanwhile
    monkeypatch.setattr(learner, "stream_budget", lambda session: 1)
    a, b = desk.slot("a", 1), desk.slot("b", 2)
    a.send(3)
    b.send(2)
    trainer = desk.trainer()
    desk.train(trainer, entries=5)
    a.send(2)
    desk.read(trainer, 2)
    # Balanced at once; what was settled is published by the link's next turn
    found = audit_live(desk.data, desk.keys, settling_s=0.0)
    assert (found.problems(), found.acknowledged) == ([], 7)
    eventually(lambda: audit_live(desk.data, desk.keys).in_stream == 2, "the ledger knows that five are settled")
    b.writer.close()
    trainer.checkpoint(wait=True)
    eventually(lambda: not desk.data.exists(desk.keys.stream("b")), "the stream of b is trimmed and swept")
    found = audit_live(desk.data, desk.keys, settling_s=0.0)
    assert (found.problems(), found.acknowledged, found.in_stream) == ([], 7, 2)
    # When the learner is killed, it balances as of its checkpoint
    desk.abandon(trainer)
    again = audit(desk.data, desk.keys, desk.session.run.folder)
    assert again is not None
    assert (again.problems(), again.acknowledged, again.in_stream) == ([], 7, 2)
    # And when somebody takes an entry out that nobody has read, that is told
    desk.data.xdel(desk.keys.stream("a"), f"{a.writer.epoch}-4")
    [problem] = audit_live(desk.data, desk.keys, settling_s=0.0).problems()
    assert problem.startswith("slot a: 1 acknowledged fragments are accounted for nowhere")
    # And the command says so
    desk.session.run.save()
    command = [sys.executable, "-m", "clawq.cli.main", "log", "ledger", str(desk.session.run.folder)]
    env = {**os.environ, "CLAWQ_DATA_URL": desk.session.data_url, "CLAWQ_BROKER_URL": desk.session.broker_url}
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 1, said.stdout + said.stderr
    assert f"WRONG: {problem}" in said.stdout


def test_C28_a_killed_learner_goes_on_from_its_checkpoint_and_takes_nothing_twice(desk: Desk) -> None:
    a, b = desk.slot("a", 1), desk.slot("b", 2)
    a.send(6)
    b.send(6)
    b.spoil()
    first = desk.trainer()
    desk.train(first, entries=13, updates=10)
    first.checkpoint(wait=True)
    saved, at_checkpoint = first.state.state_dict(), valid_rows(a, b)
    # Given a learner that went on after its checkpoint and was killed
    a.send(5)
    b.send(5)
    desk.train(first, entries=23, updates=saved["updates"] + 5)
    first.train(Until(lambda: first.publishing.version > saved["version"]))
    desk.abandon(first)
    head = int(desk.data.hget(desk.keys.control, "head") or 0)
    assert head > saved["version"]
    # When it is resumed, it is where the checkpoint was
    second = desk.trainer(resume=True)
    assert second.parts.limiter.state_dict() == saved["limiter"]
    assert second.parts.updater.updates == saved["updates"]
    assert second.parts.ring.size == second.parts.intake.env_steps == len(at_checkpoint)
    assert_normaliser_saw(second, at_checkpoint)
    # But its weights are newer than any that were published
    assert second.publishing.version > head
    # And when it goes on, everything was taken exactly once
    desk.train(second, entries=23, updates=saved["updates"] + 1)
    numbers = second.numbers()
    assert numbers["env_steps"] == len(valid_rows(a, b))
    assert numbers["gap_fragments"] == numbers["duplicates"] == 0
    assert numbers["rejected/corrupt"] == 1
    assert_normaliser_saw(second, valid_rows(a, b))
    desk.train_on(second)
    assert_limiter_is_exact(second)
    desk.abandon(second)
    assert int(desk.data.hget(desk.keys.control, "head") or 0) >= second.publishing.version


def test_streams_are_trimmed_only_behind_what_a_checkpoint_on_disk_holds(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(learner, "stream_budget", lambda session: 1)
    trainer = desk.trainer()
    link, folder = trainer.parts.link, desk.session.run.checkpoints

    def let_the_link_work() -> None:
        """Two turns of the link's thread: what it was going to trim is trimmed."""
        for turn in range(2):
            link.notify("turn", turn=turn)
            eventually(lambda: any(e.kind == "turn" for e in link.take_events()), "a turn of the link")

    a = desk.slot("a", 1)
    a.send(4)
    desk.train(trainer, entries=4)
    # Given committed fragments, and a checkpoint that cannot be written
    folder.rename(folder.with_name("moved"))
    folder.write_text("in the way")
    trainer.checkpoint(wait=True)
    let_the_link_work()
    assert desk.in_streams() == 4
    # When it can be, they go; what came after it stays, though it was read
    folder.unlink()
    trainer.checkpoint(wait=True)
    eventually(lambda: desk.in_streams() == 0, "trimming")
    a.send(3)
    desk.read(trainer, 3)
    let_the_link_work()
    assert desk.in_streams() == 3


def test_a_checkpoint_is_due_by_bytes_too_so_that_trimming_never_starves(desk: Desk, eventually: Eventually) -> None:
    config = desk.session.run.config
    small = config.redis.model_copy(update={"stream_bytes": 1_000_000})
    desk.session.run = replace(desk.session.run, config=config.model_copy(update={"redis": small}))
    # Hundreds of fragments are only to be read: few updates for them
    desk.change(rate_limit={"samples_per_insert": 0.1, "min_size_to_sample": 40, "error_buffer": 260})
    a = desk.slot("a", 1)
    a.send(1)
    each = len(encode(a.sent[0]))
    due = int(CHECKPOINT_SHARE * 1_000_000 / each) + 1
    trainer = desk.trainer()
    folder = desk.session.run.checkpoints
    a.send(due - 2)
    desk.train(trainer, entries=due - 1)
    desk.train_on(trainer, most=10_000)
    assert not list(folder.glob("*.ckpt")), "an hour is far away, and so are the bytes"
    a.send(1)
    desk.train(trainer, entries=due)
    desk.train_on(trainer, most=10_000)
    eventually(lambda: len(list(folder.glob("*.ckpt"))) == 1, "a checkpoint")
    # And the next one only after as many bytes again
    a.send(due // 2)
    desk.train(trainer, entries=due + due // 2)
    desk.train_on(trainer, most=10_000)
    assert len(list(folder.glob("*.ckpt"))) == 1


def test_priorities_are_the_td_errors_of_the_newest_update_and_a_resumed_learner_goes_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.configure(sampler="prioritized")
    a = desk.slot("a", 1)
    a.send(6)
    trainer = desk.trainer()
    sampler, algorithm = trainer.parts.sampler, trainer.parts.updater.algorithm
    assert isinstance(sampler, PrioritizedSampler)
    told: list[tuple[Any, Any]] = []
    learned = sampler.learned

    def listen(rows: Any, td_error: Any) -> None:
        told.append((rows, td_error))
        learned(rows, td_error)

    monkeypatch.setattr(sampler, "learned", listen)
    desk.train(trainer, entries=6, updates=5)
    assert sampler.check_valid() == (True, "")
    assert len(told) == trainer.parts.updater.updates
    rows, error = told[-1]
    assert torch.equal(error, algorithm.td_error)
    # A row that was drawn twice keeps its later priority.
    expected = dict(zip(rows % trainer.parts.ring.capacity, (error.double() + 1e-6) ** 0.6, strict=True))
    np.testing.assert_allclose(sampler._tree.get(np.array([*expected])), [*expected.values()], rtol=1e-6)
    assert trainer.numbers()["late_priorities"] == 0
    trainer.checkpoint(wait=True)
    desk.abandon(trainer)
    second = desk.trainer(resume=True)
    assert second.parts.sampler.state_dict()["largest"] == sampler.state_dict()["largest"]
    a.send(3)
    desk.train(second, entries=9, updates=trainer.parts.updater.updates + 1)


def test_C30_either_side_that_is_blocked_for_too_long_is_named_with_error_and_bounds(desk: Desk) -> None:
    # A fragment calls for a dozen updates, so the next one waits for many of them
    desk.change(rate_limit={"samples_per_insert": 16, "min_size_to_sample": 40, "timeout_s": 0.05})
    trainer = desk.trainer()
    told: list[tuple[str, dict[str, Any]]] = []
    link: Any = trainer.parts.link
    link.notify = lambda kind, **facts: told.append((kind, facts))

    def named(side: str) -> list[dict[str, Any]]:
        return [facts for kind, facts in told if kind == "rate_limit_timeout" and facts["side"] == side]

    # Given a first fragment that does not fill the ring, and no other
    slot = desk.slot("a", 1)
    slot.send(1)
    trainer.train(Until(lambda: bool(named("sample"))))
    assert named("insert") == []
    assert "sample was blocked for" in trainer.notices.recent
    # And updates that take so long that fragments wait for them
    slot.send(40)
    algorithm: Any = trainer.parts.updater.algorithm
    step = algorithm.step

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.04)
        return step(*arguments)

    algorithm.step = slowly
    trainer.train(Until(lambda: bool(named("insert"))))
    facts, (low, high) = named("insert")[0], trainer.parts.limiter.bounds
    assert (facts["low"], facts["high"]) == (low, high)
    # The next fragment would take it past its upper bound.
    assert high - STEPS * ENVS * 16 < facts["error"] <= high
    assert facts["waited_s"] >= 0.05


@pytest.mark.parametrize(
    "junk",
    [{"version": 1e999}, {"mean_return": 1e999}, {"mean_return": math.nan}, {"version": 10**400}, {"version": []}],
)
def test_an_evaluation_that_makes_no_sense_is_left_out(desk: Desk, junk: dict[str, Any]) -> None:
    trainer = desk.trainer()
    trainer.appraisal.take({"mean_return": 3.0, "version": 1, **junk})
    assert trainer.appraisal.best_return == -math.inf
    assert "cannot be understood" in trainer.notices.recent
    trainer.appraisal.take({"mean_return": 3.0, "version": 1, "success": math.nan})
    assert trainer.appraisal.best_return == 3.0


def test_priorities_without_td_errors_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Td3, "td_error", None)
    desk.configure(sampler="prioritized")
    with pytest.raises(UserError, match=r"replay.sampler: prioritized needs TD errors.*td3"):
        desk.trainer()


def test_hindsight_without_goals_is_refused(desk: Desk) -> None:
    desk.configure(hindsight=Hindsight())
    with pytest.raises(UserError, match=r"replay.hindsight: .* has no goals"):
        desk.trainer()


# --- the ways of sampling, through the real trainer ------------------------------------------------------------------


@pytest.fixture
def watching_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def valid_ids(*slots: Slot) -> list[int]:
    """Ids of the observations of all valid env steps that were sent, in the order of sending."""
    return [int(one) for one in valid_rows(*slots)[:, 0]]


@pytest.mark.usefixtures("watching_plugins", "everything_is_checked")
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_on_policy_algorithm_is_given_each_env_step_once_also_over_a_resume(desk: Desk, shuffle: bool) -> None:
    limit = {"samples_per_insert": 1, "min_size_to_sample": 16, "error_buffer": None}
    desk.change(algorithm={"name": "watching-fifo"}, rate_limit=limit)
    desk.configure(sampler="fifo", fifo=Fifo(shuffle=shuffle))
    a = desk.slot("a", 1)
    seen: list[int] = []

    def note(trainer: Trainer) -> None:
        algorithm = trainer.parts.updater.algorithm
        assert isinstance(algorithm, watching.Watching)
        seen.extend(int(one) for ids, _ in algorithm.seen for one in ids)

    a.send(6)
    first = desk.trainer()
    desk.train(first, entries=6, updates=(len(valid_ids(a)) - 16) // 16)
    desk.train_on(first)
    numbers = first.numbers()
    assert numbers["fifo/waiting"] == len(valid_ids(a)) % 16
    assert numbers["fifo/wasted"] == 0
    first.checkpoint(wait=True)
    desk.abandon(first)
    note(first)
    second = desk.trainer(resume=True)
    assert second.numbers()["fifo/waiting"] == numbers["fifo/waiting"]
    a.send(30)
    desk.train(second, entries=36)
    desk.train_on(second)
    note(second)
    assert len(seen) == len(set(seen)) == len(valid_ids(a)) // 16 * 16
    assert set(seen) <= set(valid_ids(a))
    if not shuffle:
        assert seen == valid_ids(a)[: len(seen)]
    limiter = second.parts.limiter
    assert limiter.samples == 16 * second.parts.updater.updates == len(seen)


@pytest.mark.usefixtures("watching_plugins")
def test_a_recurrent_algorithm_is_given_sequences_and_the_limiter_counts_their_steps(desk: Desk) -> None:
    limit = {"samples_per_insert": 2, "min_size_to_sample": 40, "error_buffer": None}
    desk.change(algorithm={"name": "watching-sequence"}, rate_limit=limit)
    desk.configure(sampler="sequence", sequence=Sequence(length=7, burn_in=2), batch_size=4)
    a = desk.slot("a", 1)
    a.send(8)
    trainer = desk.trainer()
    desk.train(trainer, entries=8, updates=3)
    desk.train_on(trainer)
    algorithm, parts = trainer.parts.updater.algorithm, trainer.parts
    assert isinstance(algorithm, watching.Watching)
    assert len(algorithm.seen) == parts.updater.updates
    for ids, mask in algorithm.seen:
        assert ids.shape == (7, 4)
        assert mask is not None
        assert not mask[:2].any()
    assert any(bool(mask[2:].all(0).any()) for _, mask in algorithm.seen if mask is not None)
    assert parts.limiter.samples == parts.updater.updates * 4 * 5
    low, _ = parts.limiter.bounds
    assert low <= parts.limiter.error < low + 4 * 5


@pytest.mark.usefixtures("watching_plugins")
@pytest.mark.parametrize(
    ("algorithm", "sampler", "told"),
    [
        (
            "td3",
            "fifo",
            "replay.sampler: fifo does not fit the algorithm td3, which learns from uniform or",
        ),
        ("td3", "sequence", "sequence does not fit the algorithm td3"),
        ("watching-fifo", "uniform", "uniform does not fit the algorithm watching-fifo, which learns from fifo"),
        ("watching-sequence", "fifo", "which learns from sequence"),
    ],
)
def test_a_sampler_that_an_algorithm_cannot_learn_from_is_refused(
    desk: Desk, algorithm: str, sampler: str, told: str
) -> None:
    desk.change(algorithm={"name": algorithm})
    desk.configure(sampler=sampler)
    with pytest.raises(UserError, match=told):
        desk.trainer()


@pytest.mark.usefixtures("watching_plugins")
def test_a_buffer_in_which_a_rest_could_keep_the_next_fragment_out_is_refused(desk: Desk) -> None:
    limit = {"samples_per_insert": 1, "min_size_to_sample": 16, "error_buffer": 130}
    desk.change(algorithm={"name": "watching-fifo"}, rate_limit=limit)
    desk.configure(sampler="fifo")
    with pytest.raises(UserError, match=r"error_buffer: 130 is below .* Set at least 144, or null"):
        desk.trainer()


# --- quarantine ------------------------------------------------------------------------------------------------------


def ask(desk: Desk, trainer: Trainer, **command: Any) -> dict[str, Any]:
    """Send a quarantine command to a trainer; the facts of its answer."""
    events, request = Events(desk.data, desk.keys), f"{time.monotonic_ns()}"
    last = events.newest_id()
    Orders(desk.data, desk.keys).append("quarantine_wanted", request=request, **command)
    found: list[dict[str, Any]] = []

    def is_answered() -> bool:
        found[:] = [one.facts for one in events.read(last) if one.kind == "quarantine"]
        return any(one["request"] == request for one in found)

    trainer.train(Until(is_answered))
    return next(one for one in found if one["request"] == request)


def ring_ids(trainer: Trainer) -> set[int]:
    """Ids of the observations of all rows that can be sampled."""
    ring = trainer.parts.ring
    shown = ring.obs_at(torch.from_numpy(ring.sampleable_rows()))["state"][:, 0]
    return {int(one) for one in shown}


def test_quarantined_experience_is_masked_refused_and_stays_so_over_resumes_and_a_lift(desk: Desk) -> None:
    a, b = desk.slot("a", 1), desk.slot("b", 2)
    b.shift(10_000)
    a.send(4)
    b.send(4)
    first = desk.trainer()
    desk.train(first, entries=8, updates=3)
    first.checkpoint(wait=True)
    of_a = set(valid_ids(a))
    answer = ask(desk, first, op="add", slot="a", reason="its camera was upside down")
    assert (answer["id"], answer["fragments"], answer["env_steps"]) == (1, 4, len(of_a))
    assert answer["unknown"] == {}
    assert ring_ids(first) == set(valid_ids(b))
    a.send(2)
    b.send(2)
    desk.train(first, entries=12, updates=first.parts.updater.updates + 3)
    numbers = first.numbers()
    assert numbers["rejected/quarantined"] == 2
    assert (numbers["quarantine/rules"], numbers["quarantine/masked"]) == (1, len(of_a))
    assert ring_ids(first) == set(valid_ids(b))
    # No dead letter, and the books balance
    assert "quarantined" not in DeadLetters(desk.data, desk.keys).counts()
    assert first.parts.consumer.check_valid() == (True, "")
    # Given a learner that is killed: its checkpoint is older than the rule
    desk.abandon(first)
    second = desk.trainer(resume=True)
    assert ring_ids(second) <= set(valid_ids(b))
    desk.train(second, entries=12)
    assert ring_ids(second) == set(valid_ids(b))
    assert second.numbers()["rejected/quarantined"] == 2
    [rule] = ask(desk, second, op="list")["rules"]
    assert (rule["slot"], rule["reason"], rule["lifted"]) == ("a", "its camera was upside down", None)
    # When it is lifted, what comes later is taken, and what was masked or refused stays away
    assert ask(desk, second, op="lift", id=1)["id"] == 1
    old = len(valid_ids(a))
    a.send(2)
    desk.train(second, entries=14)
    assert ring_ids(second) == set(valid_ids(b)) | set(valid_ids(a)[old:])
    second.checkpoint(wait=True)
    desk.abandon(second)
    third = desk.trainer(resume=True)
    assert ring_ids(third) == set(valid_ids(b)) | set(valid_ids(a)[old:])
    assert "error" in ask(desk, third, op="lift", id=1)


def test_a_quarantine_command_that_makes_no_sense_changes_nothing_and_is_answered(desk: Desk) -> None:
    a = desk.slot("a", 1)
    a.send(3)
    trainer = desk.trainer()
    desk.train(trainer, entries=3)
    for command, told in (
        ({"op": "add"}, "name a worker"),
        ({"op": "add", "slot": "a", "epoch": "x"}, "epoch must be a whole number"),
        ({"op": "lift", "id": 7}, "there is no rule 7; there are: none"),
        ({"op": "burn"}, "'burn' is no command"),
    ):
        assert told in ask(desk, trainer, **command)["error"]
    assert ring_ids(trainer) == set(valid_ids(a))
    assert "quarantine/rules" not in trainer.numbers()


def test_a_worker_is_quarantined_for_an_interval_and_everything_of_a_ring_may_be(desk: Desk) -> None:
    a = desk.slot("a", 1)
    a.send(3)
    trainer = desk.trainer()
    desk.train(trainer, entries=3, updates=1)
    # Test fragments are made at the beginning of time
    assert ask(desk, trainer, op="add", worker="host/worker", since_ms=1)["env_steps"] == 0
    assert ask(desk, trainer, op="add", worker="host/worker", until_ms=1)["env_steps"] == len(valid_ids(a))
    assert trainer.parts.ring.size == 0
    updates = trainer.parts.updater.updates
    a.send(1)
    desk.train(trainer, entries=4)
    assert trainer.parts.updater.updates == updates
    assert trainer.parts.limiter.check_valid() == (True, "")


def test_the_number_of_rules_is_bounded_and_lifted_ones_make_room(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MOST_RULES", 2)
    trainer = desk.trainer()
    assert ask(desk, trainer, op="add", slot="x")["id"] == 1
    assert ask(desk, trainer, op="add", slot="y")["id"] == 2
    assert "no room for more; lift some" in ask(desk, trainer, op="add", slot="z")["error"]
    ask(desk, trainer, op="lift", id=1)
    assert ask(desk, trainer, op="add", slot="z")["id"] == 3
    assert [rule["id"] for rule in ask(desk, trainer, op="list")["rules"]] == [2, 3]


def test_a_quarantine_file_that_cannot_be_read_is_told_in_words(desk: Desk) -> None:
    trainer = desk.trainer()
    ask(desk, trainer, op="add", slot="x")
    (desk.session.run.folder / "quarantine.json").write_text('{"rules": [{"slot": 5}]}')
    with pytest.raises(CheckpointInvalid, match=r"quarantine\.json is damaged: .*slot must be a text"):
        trainer.parts.quarantine.load()


def test_learning_that_is_done_again_by_the_schedule_heeds_a_quarantine_at_the_same_place(desk: Desk) -> None:
    a, b = desk.slot("a", 1), desk.slot("b", 2)
    b.shift(10_000)
    a.send(4)
    b.send(4)
    trainer = desk.trainer()
    desk.train(trainer, entries=8, updates=5)
    ask(desk, trainer, op="add", slot="a")
    a.send(1)
    b.send(3)
    desk.train(trainer, entries=12, updates=trainer.parts.updater.updates + 5)
    desk.train_on(trainer)
    desk.abandon(trainer)
    trainer.parts.recorder.close()
    run = desk.session.run

    def fetch(slot: str, epoch: int, seq: int) -> Entry | None:
        found: Any = desk.data.xrange(desk.keys.stream(slot), f"{epoch}-{seq}", f"{epoch}-{seq}")
        return Entry(slot, epoch, seq, found[0][1][b"f"]) if found else None

    again = replace(run, folder=run.folder / "again")
    (again.folder / "nonfinite").mkdir(parents=True)
    outside = Outside(trainer.parts.consumer._source, trainer.parts.link, lambda *facts: None, lambda: 0)
    parts = make_parts(again, "cpu", outside)
    learning.apply(read_schedule(run.folder / SCHEDULE_FILE), fetch, parts, make_examiner(run))
    assert parts.updater.updates == trainer.parts.updater.updates
    np.testing.assert_array_equal(parts.ring.valid_slots, trainer.parts.ring.valid_slots)
    for name, one in parts.updater.algorithm.weights().items():
        assert torch.equal(one, trainer.parts.updater.algorithm.weights()[name]), name


def rows_of(ring: ReplayRing) -> dict[str, bytes]:
    """All that a ring holds, bit for bit."""
    slots = np.arange(ring.oldest, ring.head) % ring.capacity
    columns = {**row_columns(ring), "links": ring.links, "valid": ring.valid}
    return {name: one.numpy()[slots].tobytes() for name, one in columns.items()}


def snapshotted(desk: Desk) -> tuple[Trainer, int]:
    """A trainer killed after two checkpoints with snapshots, its streams gone; and its size at the first."""
    raw = desk.session.run.config.learner.model_dump()
    desk.change(learner={**raw, "snapshot": "always"})
    a = desk.slot("a", 1)
    trainer = desk.trainer()
    a.send(10)
    desk.train(trainer, entries=10)
    trainer.checkpoint(wait=True)
    before = trainer.parts.ring.size
    a.send(12)
    desk.train(trainer, entries=22, updates=5)
    trainer.checkpoint(wait=True)
    desk.abandon(trainer)
    desk.data.delete(desk.keys.stream("a"))
    return trainer, before


def test_C28_the_ring_comes_back_from_its_snapshot_where_the_streams_hold_nothing(desk: Desk) -> None:
    first, _ = snapshotted(desk)
    second = desk.trainer(resume=True)
    assert rows_of(second.parts.ring) == rows_of(first.parts.ring)
    assert second.parts.ring.state == first.parts.ring.state
    assert "env steps are in the ring again" in desk.said[-1]
    assert "missing" not in desk.said[-1]
    # And the next checkpoint builds on what is on disk
    second.checkpoint(wait=True)
    desk.abandon(second)
    third = desk.trainer(resume=True)
    assert rows_of(third.parts.ring) == rows_of(first.parts.ring)


def test_a_damaged_chunk_is_said_with_the_env_steps_that_it_costs_and_training_goes_on(desk: Desk) -> None:
    first, _ = snapshotted(desk)
    folder = desk.session.run.checkpoints / "ring"
    name = read_header(first.parts.checkpoints.paths()[-1]).ring
    chunk = folder / load_manifest(folder, name).rows[-1].name("rows")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    second = desk.trainer(resume=True)
    assert any(chunk.name in line and "damaged" in line for line in desk.said)
    assert f"{first.parts.ring.size} env steps of 22 fragments are in the log no more" in desk.said[-1]
    assert second.parts.ring.size == 0
    assert second.parts.updater.updates == first.parts.updater.updates


def test_a_checkpoint_whose_snapshot_is_gone_gives_way_to_the_one_before_it(desk: Desk) -> None:
    first, before = snapshotted(desk)
    name = read_header(first.parts.checkpoints.paths()[-1]).ring
    (desk.session.run.checkpoints / "ring" / name).unlink()
    second = desk.trainer(resume=True)
    assert any("cannot be used" in line and name in line for line in desk.said)
    assert second.parts.ring.size == before
    assert second.parts.ring.check_valid() == (True, "")


def test_a_change_of_settings_that_was_withdrawn_is_not_made(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    trainer, orders, events = desk.trainer(), Orders(desk.data, desk.keys), Events(desk.data, desk.keys)
    # Given two changes, the first of which nobody waits for any more when the learner comes to them
    withdrawn = orders.append("tune_wanted", set=["staleness.hard=9"])
    orders.append("tune_withdrawn", id=withdrawn)
    wanted = orders.append("tune_wanted", set=["staleness.hard=10"])
    arrived = orders.read()
    monkeypatch.setattr(trainer.parts.link, "take_events", lambda: arrived)
    trainer.inbox.read(Until(lambda: False))
    assert trainer.parts.config.staleness.hard == 10

    def answered() -> list[str]:
        return [event.facts["id"] for event in events.read() if event.kind in ("tuned", "tune_refused")]

    eventually(lambda: wanted in answered(), "an answer")
    assert answered() == [wanted]


# --- demonstrations --------------------------------------------------------------------------------------------------


def shown_to(path: Path, fragments: int = 6, seed: int = 9) -> set[int]:
    """Write demonstrations whose ids are above 10 000; the ids."""
    slot = TrueSlot("d", ENVS, np.random.default_rng(seed), count(10_000), chances=Chances(0.1, 0.0))
    made = [slot.fragment(STEPS)[0] for _ in range(fragments)]
    with Hdf5Writer(path, SPEC) as writer:
        for episode in stitch(made):
            writer.write(episode)
    return {int(one) for fragment in made for one in fragment.obs["state"][:-1][..., 0].reshape(-1)}


@pytest.mark.usefixtures("watching_plugins")
def test_demonstrations_are_half_of_every_batch_and_no_env_steps_of_the_run(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "shown.hdf5"
    demonstrated = shown_to(path)
    desk.change(algorithm={"name": "watching-uniform"})
    desk.configure(demonstrations=Demonstrations(path=str(path)))
    a = desk.slot("a", 1)
    a.send(6)
    first = desk.trainer()
    desk.train(first, entries=6, updates=5)
    desk.train_on(first)
    parts = first.parts
    algorithm = parts.updater.algorithm
    assert isinstance(algorithm, watching.Watching)
    for ids, _ in algorithm.seen:
        assert set(ids[:8].tolist()) <= set(valid_ids(a))
        assert set(ids[8:].tolist()) <= demonstrated
    numbers = first.numbers()
    assert (numbers["demonstrations/env_steps"], numbers["demonstrations/rows"]) == (len(demonstrated), 8)
    # They are counted nowhere else: budget, limiter, normaliser, ring
    assert numbers["env_steps"] == parts.ring.size == algorithm.observed == parts.limiter.inserts == len(valid_ids(a))
    assert parts.limiter.samples == 8 * parts.updater.updates
    low, _ = parts.limiter.bounds
    assert low <= parts.limiter.error < low + 8
    # A resumed learner reads them again, and goes on drawing where it was
    first.checkpoint(wait=True)
    assert parts.demonstrations is not None
    state = parts.demonstrations.state_dict()
    desk.abandon(first)
    second = desk.trainer(resume=True)
    assert second.parts.demonstrations is not None
    assert torch.equal(second.parts.demonstrations.state_dict()["sampler"]["generator"], state["sampler"]["generator"])
    begun = [one for one in read_schedule(desk.session.run.folder / SCHEDULE_FILE) if isinstance(one, SessionBegun)]
    assert begun[-1].facts["demonstrations"] == state["digest"]
    with pytest.raises(CheckpointInvalid, match="the file is not the one with which this run was trained"):
        second.parts.demonstrations.load_state_dict({**state, "digest": "another"})


def test_an_evaluation_is_not_asked_for_while_the_one_before_it_is_under_way(desk: Desk) -> None:
    desk.change(evaluation={"interval_s": 0.01, "episodes": 1})
    trainer, events = desk.trainer(), Events(desk.data, desk.keys)

    def wanted() -> list[int]:
        return [int(event.facts["version"]) for event in events.read() if event.kind == "evaluation_wanted"]

    def go_on() -> list[int]:
        end_s = time.monotonic() + 1.5
        trainer.train(Until(lambda: time.monotonic() > end_s))
        return wanted()

    desk.slot("a", 1).send(20)
    desk.train(trainer, 20, updates=1)
    # When no worker has time for it, however long that takes
    [first] = go_on()
    # Then each answer lets the next one be asked for, whether it is a result
    events.append("evaluation", id="1-0", label="training", version=first, mean_return=-1.0)
    asked = go_on()
    assert len(asked) == 2
    # or a failure
    events.append("evaluation_failed", id="2-0", label="training", version=asked[-1], reason="timeout", error="late")
    assert len(go_on()) == 3
    # And its state was kept until its score was known
    assert trainer.appraisal.best_return == -1.0
    assert trainer.parts.checkpoints.best() is not None
