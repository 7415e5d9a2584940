"""The tasks: what a worker does when told to. Plain functions; clawq.control.app makes Celery tasks of them.

Each has its arguments judged (clawq.control.arguments) and looks its run up (a command for a run that is over does
nothing), does its work in an exec'ed program, and appends its report to the run's events; nothing is returned through
Celery. Doing one twice does no harm: a second lease is more experience, a second evaluation has the same id and is
ignored by who waits for it.

Events appended (all with `worker`):

    lease               slot, env_steps, fragments, episodes, reason, dropped
    actor_failed        slot, reason (one word), error (with the end of the actor's log), broken_off (episodes)
    actor_recycled      slot, why (`memory` or `fragments`), memory_mb, made (fragments), broken_off (episodes)
    evaluation_started  id, label, version
    evaluation          id, label, version, and the numbers of clawq.programs.evaluate
    evaluation_failed   id, label, version, reason, error
    recording, recording_failed
"""

import logging
from collections.abc import Callable
from typing import Any

from clawq.control.actor_process import Lease
from clawq.control.arguments import check_evaluation, check_lease, check_recording
from clawq.control.pool_process import PoolProcess, pool_process
from clawq.errors import TransportError, UserError
from clawq.spawning.failure import Failure
from clawq.transport.control import RunRecord

log = logging.getLogger(__name__)

_ERROR_CHARS = 4000


def rollout(run_id: str, seconds: float) -> dict[str, Any]:
    """One lease: drive a slot's actor for `seconds` for that run; returns the actor's report."""
    if refused := _refused("rollout", check_lease, run_id, seconds):
        return refused
    place = pool_process()
    run = place.run(run_id)
    if run is None:
        return {"reason": "no_run"}
    described = describe_run(run)
    worker = slot_owner(place)

    def make_lease(slot: str) -> Lease | None:
        if place.stopped(run.tag):
            return None
        return Lease(described, slot, worker, place.data_url, seconds)

    try:
        report = place.slots.run_lease(make_lease, run.tag, seconds)
    except Failure as failure:
        if failure.kind == "late":
            # The worker is ending and the actor was still starting, or had too much to send. No fault to report.
            log.warning("run %s: %s", run.run_id, failure)
            return {"reason": "worker_stopping"}
        facts = {"slot": failure.slot, "broken_off": failure.broken_off}
        _report_failure(place, run, "actor_failed", failure, facts)
        return {"reason": "actor_failed", "failure": failure.kind}
    if "slot" in report:
        _append(place, run, "lease", {"worker": worker, **report})
    if report.get("reason") == "recycled":
        facts = {name: report.get(name) for name in ("slot", "why", "memory_mb", "made", "broken_off")}
        log.warning("run %s: an actor was recycled: %s", run.run_id, facts)
        _append(place, run, "actor_recycled", {"worker": worker, **facts})
    return report


def evaluate(
    run_id: str,
    version: int,
    episodes: int,
    seed: int,
    label: str = "",
    evaluation: str = "",
    timeout_s: float = 300.0,
) -> dict[str, Any]:
    """Evaluate one weights version with the deterministic policy.

    Args:
        run_id: the run.
        version: weights version.
        episodes: how many, with seeds seed, seed + 1, ...
        seed: of the first episode.
        label: `periodic` or `final`, for people and the learner.
        evaluation: id that comes back in the event.
        timeout_s: it is given up when it takes longer.
    """
    if refused := _refused("evaluate", check_evaluation, run_id, version, episodes, seed, timeout_s, label, evaluation):
        return refused
    request = {"version": version, "episodes": episodes, "seed": seed}
    facts = {"id": evaluation, "label": label, "version": version}
    return _run_reported("evaluation", "clawq.programs.evaluate", run_id, request, facts, timeout_s)


def record(run_id: str, request: dict[str, Any] | None = None, timeout_s: float = 600.0) -> dict[str, Any]:
    """Record the policy: `request` goes to clawq.programs.record, with run and data_url added."""
    if refused := _refused("record", check_recording, run_id, request or {}, timeout_s):
        return refused
    wanted = dict(request or {})
    if "out" in wanted:
        # A plain name: nothing that comes over the wire names a folder.
        wanted["out"] = str(pool_process().identity.settings.log_folder / wanted["out"])
    return _run_reported("recording", "clawq.programs.record", run_id, wanted, {}, timeout_s)


def _refused(task: str, check: Callable[..., None], *arguments: Any) -> dict[str, Any] | None:
    """The answer to a task whose arguments make no sense, None if they do."""
    try:
        check(*arguments)
    except UserError as error:
        log.warning("clawq.%s was refused: %s", task, error)
        return {"reason": "refused", "error": str(error)}
    return None


def describe_run(run: RunRecord) -> dict[str, Any]:
    """What exec'ed programs are told of a run."""
    return {"id": run.run_id, "tag": run.tag, "config": run.config, "spec": run.spec}


def slot_owner(place: PoolProcess) -> str:
    """Host and worker, for people."""
    return place.identity.name


def _run_reported(
    kind: str, program: str, run_id: str, request: dict[str, Any], facts: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    place = pool_process()
    run = place.run(run_id)
    if run is None:
        return {"reason": "no_run"}
    described = describe_run(run)
    if facts:
        _append(place, run, f"{kind}_started", {**facts, "worker": slot_owner(place)})
    try:
        result = place.run_program(program, {"run": described, **request}, timeout_s)
    except Failure as failure:
        _report_failure(place, run, f"{kind}_failed", failure, facts)
        return {"reason": f"{kind}_failed", "failure": failure.kind}
    # The version in the result is the one that was really evaluated.
    _append(place, run, kind, {**facts, **result, "worker": slot_owner(place)})
    return result


def _report_failure(
    place: PoolProcess, run: RunRecord, kind: str, failure: Failure, facts: dict[str, Any] | None = None
) -> None:
    log.warning("run %s: %s: %s", run.run_id, kind, failure)
    error = str(failure)[:_ERROR_CHARS]
    _append(place, run, kind, {**(facts or {}), "worker": slot_owner(place), "reason": failure.kind, "error": error})


def _append(place: PoolProcess, run: RunRecord, event: str, facts: dict[str, Any]) -> None:
    try:
        place.events(run).append(event, **facts)
    except TransportError as error:
        # The report is lost, the work is not: fragments and weights do not go through here.
        log.warning("run %s: the report of %s could not be written: %s", run.run_id, event, error)


__all__ = ["describe_run", "evaluate", "record", "rollout"]
