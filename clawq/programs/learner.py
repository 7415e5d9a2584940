"""The learner daemon, from start to end: find or make the run, put its parts together, train, finish.

    open    claim and register the run, start its coordinator    (`clawq.programs.session`)
    build   the parts, restored from the newest checkpoint when the run is resumed
    train   `clawq.programs.train`
    finish  final weights, final evaluation, pictures, report        (`clawq.programs.finish`)
    close   actors are told to stop, threads end, the claim is given back

Ended early (SIGTERM, Ctrl-C, an error) it writes a last checkpoint, leaves the streams where they are, and can be
resumed: optimisers, targets, normaliser, limiter, cursors and the weights version go on, and the ring is rebuilt from
its snapshot and from what the log retains.
"""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from clawq import progress
from clawq.config import RunConfig
from clawq.core import Control
from clawq.cores import CorePlan, available_cores, plan_cores
from clawq.errors import CheckpointInvalid, UserError
from clawq.metrics import open_writers
from clawq.programs.archiving import arrears, newest_version, open_archiver
from clawq.programs.arithmetic import set_up_torch
from clawq.programs.audit import keep, ledger_at_end, published
from clawq.programs.balance import Balance
from clawq.programs.checkpoint import Checkpoints
from clawq.programs.extras import extras_of
from clawq.programs.farewell import Farewell
from clawq.programs.finish import Finish
from clawq.programs.following import Following, take_place
from clawq.programs.link import Link, Wires
from clawq.programs.memory import Machine, forecast
from clawq.programs.parts import Outside, make_examiner, make_parts
from clawq.programs.resume import (
    STATE_FORMAT,
    archived,
    bring_back_ring,
    copier,
    describe_ring,
    find_state,
    rebase_limiter,
    refusal,
)
from clawq.programs.run import Run, without_secrets, writing
from clawq.programs.session import Session, first_window
from clawq.programs.train import Trainer
from clawq.programs.upkeep import Upkeep
from clawq.replay.rebuild import ranges
from clawq.transport.archiver import Archiver
from clawq.transport.books import Books
from clawq.transport.client import max_memory_bytes, memory_bytes, memory_left_bytes
from clawq.transport.control import Board, ControlRecord, Events, Heartbeats, Orders, PaceRecord
from clawq.transport.dead_letters import DeadLetters
from clawq.transport.keys import LEARNER
from clawq.transport.lives import LostLives
from clawq.transport.outstanding import Outstanding
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.urls import is_local
from clawq.transport.weights import WeightsPublisher
from clawq.types import Metrics

#: Share of the data server's memory that the streams may take: publishing must always fit.
STREAM_SHARE = 0.55
#: Stream budget where the server has no memory limit.
UNLIMITED_STREAM_BYTES = 1_000_000_000
#: How long ending may take until threads and children are left behind or killed, seconds.
END_S = 5.0


def choose_device(wanted: str) -> str:
    """`auto`, `cpu` or `cuda:i` -> a torch device; UserError if it is not there."""
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda"):
        count = torch.cuda.device_count()
        if int(wanted.partition(":")[2]) >= count:
            raise UserError(
                f"learner.device: {wanted} is not there; torch {torch.__version__} sees {count} CUDA devices. "
                "Use auto or cpu, or install a CUDA build of torch."
            )
    return wanted


def core_plan(config: RunConfig, device: str) -> CorePlan:
    """How the cores of this machine are divided for this run."""
    wanted = config.cores
    return plan_cores(available_cores(), wanted.learner_threads, wanted.slots, wanted.actor_threads, device)


def run_learner(session: Session, stop: threading.Event, say: Callable[[str], None], resume: bool) -> dict[str, Any]:
    """Train a run to its end, or until `stop` is set; returns the report (also in report.json).

    Args:
        session: the open run.
        stop: set it to end early (a checkpoint is written).
        say: one line for people.
        resume: go on from the newest checkpoint.

    Raises:
        UserError: the ring does not fit; the device is not there.
        LearnerError: training cannot go on; a checkpoint was written.
        ClaimLost: another learner took the run over.
    """
    device = choose_device(session.run.config.learner.device)
    cores = core_plan(session.run.config, device)
    set_up_torch(cores.learner_threads)
    say(f"learner: device {device}; {cores.text}")
    session.state = "failed"
    trainers: list[Trainer] = []

    def keep_all_books() -> None:
        for one in trainers:
            keep_books(session, one)

    with ExitStack() as stack:
        # When everything has stopped: nothing is settled any more, by any reader of this process.
        stack.callback(keep_all_books)
        archiver = open_archiver(session.run, session.data, say)
        if archiver is not None:
            # Behind all others: what the streams hold by then is archived.
            stack.callback(archiver.close, END_S)
        trainer, writers = build(session, device, resume, say, archiver)
        if resume:
            tell_spent(trainer, session.run, say)
            # The state fits the configuration that was given: it is the run's own from now on.
            with writing(session.run.folder):
                session.run.save_config()
                session.run.save()
        trainers.append(trainer)
        stack.callback(writers.close)
        stack.callback(trainer.close)
        stack.callback(trainer.parts.link.release_reader)
        stack.callback(trainer.parts.link.stop, END_S)
        stack.callback(trainer.parts.consumer.close, END_S)
        trainer.parts.consumer.start()
        session.take_over_claim()
        trainer.parts.link.start()
        if archiver is not None:
            archiver.start()
        trainer.publish()
        trainer.inbox.keep_config = partial(keep_config, session)
        outstanding, wanted = Outstanding(session.data, session.keys), session.run.config
        farewell = Farewell(
            outstanding, wanted.learner.wait_for_readers_s, session.run.id, archive=wanted.archive.enabled
        )
        finish = Finish(session.run, session.data_url, session.spawner, trainer, farewell)
        try:
            trainer.train(stop)
            # Evaluation and pictures take what they take, and have limits of their own.
            progress.mine().moved("finish")
        except BaseException as error:
            finish.stopped_early(str(error) or type(error).__name__)
            raise
        if trainer.parts.budget.reached is None:
            session.state = "stopped"
            return finish.stopped_early(trainer.ending or "stopped by the user")
        report = finish.complete(stop, say)
        session.state = "stopped" if report["resumable"] else "done"
        trainer.parts.link.leave_source()
        return report


def tell_spent(trainer: Trainer, run: Run, say: Callable[[str], None]) -> None:
    """Say so if a resumed run has nothing left to spend: it is finished again, and learns nothing more."""
    more = trainer.parts.budget.more(time.monotonic(), trainer.parts.tempo.env_steps)
    if more is not None:
        say(
            f"nothing more is learned: the budget is spent ({more.spent}); only the end is made again (evaluation, "
            f"pictures). To go on, give more: `clawq up --resume {run.folder} {more.key}`"
        )


def keep_config(session: Session, config: RunConfig) -> None:
    """Keep a configuration that was changed live: for a resume in the run folder, for workers in the registry.

    Raises OSError if the folder refuses; the registry is told all the same.
    """
    session.run = replace(session.run, config=config)
    session.record = replace(session.record, config=without_secrets(config).model_dump(mode="json"))
    if session.keeper is not None:
        session.keeper.update(session.record)
    session.run.save_config()
    session.run.save()


def keep_books(session: Session, trainer: Trainer) -> None:
    """Leave the ledger's last balance in the run folder."""
    lost = trainer.numbers().get("lost_unacked", 0.0)
    reader = LEARNER if session.source is None else session.source.reader
    finished = session.state == "done" and session.source is None
    keep(session.data, session.streams, session.run.folder, trainer.parts.consumer, lost, reader, finished)


def build(
    session: Session, device: str, resume: bool, say: Callable[[str], None], archiver: Archiver | None = None
) -> tuple[Trainer, Any]:
    """The trainer with all its parts, restored from the newest checkpoint if `resume`, and its open metric writers."""
    writers = open_writers(session.run.config.metrics, session.run.folder)
    try:
        return put_together(session, device, resume, say, writers.write, archiver), writers
    except BaseException:
        writers.close()
        raise


def put_together(
    session: Session,
    device: str,
    resume: bool,
    say: Callable[[str], None],
    report: Callable[[int, float, Metrics], None],
    archiver: Archiver | None,
) -> Trainer:
    """The trainer of `build`; `report` as in Trainer."""
    run, config, data, keys = session.run, session.run.config, session.data, session.keys
    state = find_state(Checkpoints(run.checkpoints, config.learner.keep_checkpoints), run, say) if resume else None
    consumed = None if state is None else state["consumer"]
    ended = None if consumed is None else ledger_at_end(run.folder, consumed)
    reader = make_reader(session, consumed, ended)
    budget = stream_budget(session)
    publisher = WeightsPublisher(data, keys, session.claim, config.learner.keep_weights)
    wires = Wires(
        claim=session.claim,
        publisher=publisher,
        control=ControlRecord(data, keys, session.claim),
        events=Events(data, keys),
        orders=Orders(data, keys),
        board=Board(data, keys),
        reader=reader,
        heartbeats=Heartbeats(data, keys),
        upkeep=make_upkeep(session, reader, budget),
        pace=PaceRecord(data, keys, session.record.created_ms),
        archiver=archiver,
        books=Books(data, session.streams, reader.name),
        lives=LostLives(data, session.streams),
    )
    desired = Control(head=0, stop=False, window_bytes=config.redis.window_bytes, config_epoch=1)
    link = Link(wires, desired, budget, session.after, first_window(run))
    versions = Versions()
    outside = Outside(reader, link, DeadLetters(data, keys).append, versions.current)
    admit = partial(check_memory, session, device, say)
    if consumed is not None and ended is not None and ended.finished:
        consumed = {**consumed, "finished": True}
    parts = make_parts(run, device, outside, consumed, admit)
    reader.tell_server(parts.consumer.on_server)
    reader.tell_slots(parts.consumer.on_slots)
    if session.source is None:
        reader.begin_with(arrears(run, data, parts.consumer.newest))
    link.books = partial(published, parts.consumer)
    facts = session_facts(run, device)
    identity = {
        "format": STATE_FORMAT,
        "run": run.id,
        "tag": run.tag,
        "env": run.spec.fingerprint,
        "config": facts["config"],
    }
    trainer = Trainer(parts, identity, report)
    versions.trainer = trainer
    head = trainer.publishing.version = max(publisher.head(), newest_version(run) if resume else 0)
    if state is not None:
        missing = bring_back_ring(
            parts,
            state["ring"],
            reader.read_back(state["consumer"]["cursors"]),
            archived(run),
            make_examiner(run),
            copier(run, parts, state, say),
        )
        try:
            trainer.state.load_state_dict(state, head)
        except CheckpointInvalid as error:
            raise refusal(error, state["config"], facts["config"]) from error
        rebase_limiter(parts, state, missing)
        facts["missing"] = ranges(missing)
        say(
            f"resumed {run.id} at update {parts.updater.updates}, {parts.intake.env_steps} env steps, "
            f"weights {trainer.publishing.version}; {describe_ring(parts.ring, missing)}"
        )
    # Of a run that begins anew too: it was told what not to learn from.
    parts.quarantine.load()
    trainer.state.begin_session(facts)
    return trainer


def session_facts(run: Run, device: str) -> dict[str, Any]:
    """What learning depends on beside log and schedule: code, numerics, configuration."""
    config = without_secrets(run.config).model_dump(mode="json")
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()
    return {
        "clawq": version("clawq"),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": device,
        "host": socket.gethostname(),
        "began_s": round(time.time(), 3),
        "config_digest": digest,
        "config": config,
    }


def make_reader(session: Session, consumed: Mapping[str, Any] | None, ended: Balance | None) -> StreamReader:
    """The reader of the run's streams, going on where a checkpoint's consumer and its learner's last balance stand."""
    source, keys, what = session.source, session.streams, session.record.learner_text
    name, required = (LEARNER, True) if source is None else (source.reader, source.required)
    if consumed is None:
        return StreamReader(session.data, keys, name, required=required, what=what)
    return StreamReader(
        session.data,
        keys,
        name,
        required=required,
        cursors=consumed["cursors"],
        server=consumed.get("server", ""),
        # A learner that was killed left no balance: if the streams are gone too, only its archive knows what was there.
        unread=None if ended is None else ended.unread,
        ordinals=consumed.get("ordinals"),
        what=what,
    )


def make_upkeep(session: Session, reader: StreamReader, budget_bytes: int) -> Upkeep | Following:
    """What keeps the run's own streams; or, of a follower, its place among the readers of others."""
    data, source = session.data, session.source
    if source is not None:
        take_place(reader)
        return Following(reader, source, data, session.broker)
    return Upkeep(reader, Readers(data, session.keys), partial(memory_bytes, data), budget_bytes, session.run.id)


class Versions:
    """The learner's current version, for the consumer, which is made before the trainer."""

    trainer: Trainer | None = None

    def current(self) -> int:
        """Newest version handed out."""
        return 0 if self.trainer is None else self.trainer.publishing.version


def check_memory(session: Session, device: str, say: Callable[[str], None], weights_bytes: int) -> None:
    """Say what the run will take of memory; UserError if it does not fit, with the largest capacity that does."""
    gpu = device != "cpu"
    machine = Machine.here(torch.cuda.mem_get_info(torch.device(device))[0] if gpu else None)
    streams, server = stream_budget(session) if session.source is None else 0, 0
    if is_local(session.data_url):
        left = memory_left_bytes(session.data)
        server = streams if left is None else left
    config, spec = session.run.config, session.run.spec
    planned = forecast(
        config, spec, gpu=gpu, server=server, streams=streams, weights=weights_bytes, extras=extras_of(config, spec)
    )
    planned.check(machine)
    say(planned.text(machine))


def stream_budget(session: Session) -> int:
    """Bytes that the run's streams may hold."""
    wanted = session.run.config.redis.stream_bytes
    memory = max_memory_bytes(session.data)
    share = int(memory * STREAM_SHARE) if memory else UNLIMITED_STREAM_BYTES
    return share if wanted is None else min(wanted, share)
