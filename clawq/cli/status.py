"""`clawq status`: the runs on this Redis, how they are doing, and which workers serve them.

Everything shown is read from Redis: the registry of runs on the broker; board, heartbeats and dead letters on the data
server. Nothing is written, and no learner or worker is asked, so it answers even when they hang.
"""

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from clawq.cli.times import shown

if TYPE_CHECKING:
    from clawq.cli.screen import Snapshot
    from clawq.transport.control import Heartbeat, RunRecord

#: Between two looks of `--watch`.
_WATCH_S = 1.0
#: How long `--watch` waits for a Redis that does not answer.
_PATIENCE_S = 60.0

#: States of a run in which nothing moves any more.
_OVER = ("done", "failed")


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--watch", is_flag=True, help="Keep showing RUN (or the newest run) until it is over.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def status(run_id: str | None, watch: bool, as_json: bool) -> None:
    """Show the runs, or one RUN in detail."""
    view = View(run_id)
    if watch:
        _watch(view, run_id)
        return
    runs = [view.find(run_id)] if run_id else view.runs()
    if as_json:
        click.echo(json.dumps([view.facts(run) for run in runs], indent=2))
    elif run_id:
        _print_one(view, runs[0])
    elif not runs:
        click.echo("no runs; start one with `clawq up CONFIG` or `clawq learner start CONFIG`")
    else:
        for run in runs:
            _print_brief(view, run)
    if not (as_json or run_id) and (buried := view.commands.dead(1)):
        click.echo(f"commands were set aside, the last one at {shown(buried[0].buried_ms)}: `clawq worker dead ls`")


class View:
    """What Redis says about runs.

    Args:
        run_id: the run that is asked for, if it is one: where no Redis is known, it is told how that one ended.

    Raises UserError when no Redis is known, TransportError when it cannot be used.
    """

    def __init__(self, run_id: str | None = None) -> None:
        from clawq.errors import UserError
        from clawq.state import resolve_urls
        from clawq.transport.client import connect
        from clawq.transport.commands import Commands
        from clawq.transport.control import RunRegistry

        urls = resolve_urls()
        if urls is None:
            if run_id is not None:
                _refuse_ended(run_id)
            raise UserError(
                "no clawq Redis is running on this machine; for one elsewhere set CLAWQ_BROKER_URL and CLAWQ_DATA_URL"
            )
        broker_url, data_url = urls
        broker = connect(broker_url)
        self.registry, self.commands = RunRegistry(broker), Commands(broker)
        self.data = connect(data_url)

    def runs(self) -> "list[RunRecord]":
        return self.registry.list()

    def find(self, run_id: str) -> "RunRecord":
        import difflib

        from clawq.errors import UserError

        run = self.registry.get(run_id)
        if run is not None:
            return run
        _refuse_ended(run_id)
        known = [other.run_id for other in self.runs()]
        near = difflib.get_close_matches(run_id, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
        raise UserError(f"there is no run {run_id!r}; {hint}")

    def find_at_work(self, run_id: str) -> "RunRecord":
        """The run, if its learner lives; UserError, with how to go on, if it was killed or has ended."""
        from clawq.errors import UserError

        run = self.find(run_id)
        dead = self.dead(run)
        if dead is not None:
            raise UserError(f"run {run_id} has {dead}")
        return run

    def dead(self, run: "RunRecord") -> str | None:
        """What to say of a run whose learner is gone without having said so; None if it lives."""
        from clawq.transport.claims import holder_of

        if run.state in _OVER or holder_of(self.data, run.keys.claim("learner")) is not None:
            return None
        folder = run.learner.get("folder", "FOLDER")
        return (
            "no living learner: it was killed, and holds what it had at its last checkpoint. Go on with it, under "
            f"other settings if you like: `clawq up --resume {folder} KEY=VALUE`; or take it off the list: "
            f"`clawq learner forget {run.run_id}`. (Or its data Redis is another one than here: see CLAWQ_DATA_URL.)"
        )

    def snapshot(self, run: "RunRecord") -> "Snapshot":
        from clawq.transport.control import Board

        shown: Snapshot = {"stage": run.state, **Board(self.data, run.keys).read(), "run": run.run_id}
        # A full server takes no note of anybody: what is on the board is from before.
        full = self.full()
        return {**shown, "note": full} if full else shown

    def full(self) -> str | None:
        """What to say if the data server is out of memory."""
        from clawq.programs.upkeep import memory_text
        from clawq.transport.client import memory_bytes

        return memory_text(*memory_bytes(self.data))

    def workers(self, run: "RunRecord") -> "dict[str, Heartbeat]":
        from clawq.transport.control import Heartbeats

        return Heartbeats(self.data, run.keys).read()

    def facts(self, run: "RunRecord") -> dict[str, Any]:
        from dataclasses import asdict

        return {
            "run_id": run.run_id,
            "state": run.state,
            "created_ms": run.created_ms,
            "learner": run.learner,
            "metrics": self.snapshot(run),
            "workers": {name: asdict(beat) for name, beat in self.workers(run).items()},
        }


def _refuse_ended(run_id: str) -> None:
    from clawq.programs.endings import refuse_ended

    refuse_ended(run_id)


def _print_brief(view: View, run: "RunRecord") -> None:
    from clawq.cli.screen import line

    click.echo(f"{run.run_id}  {run.state}")
    click.echo(f"  {line(view.snapshot(run))}")


def _print_one(view: View, run: "RunRecord") -> None:
    from clawq.cli.screen import rows

    click.echo(run.run_id)
    for label, text in [*rows(view.snapshot(run)), ("learner", _place(run.learner))]:
        click.echo(f"  {label:<12}{text}")
    if (dead := view.dead(run)) is not None:
        click.echo(f"  learner     {dead}")
    beats = view.workers(run)
    for name, beat in sorted(beats.items()):
        again = f", started again {beat.restarts} times" if beat.restarts else ""
        busy = f"{beat.busy} of {beat.slots} slots busy"
        click.echo(f"  worker      {name}: {busy} (host {beat.host}, pid {beat.pid}{again})")
    if not beats:
        click.echo("  worker      none; start one with `clawq worker start`")


def _watch(view: View, run_id: str | None) -> None:
    from clawq.cli.screen import Screen
    from clawq.errors import TransportError, UserError
    from clawq.state import resolve_urls

    runs = view.runs()
    if run_id is None and not runs:
        raise UserError("there is no run to watch")
    name = run_id or runs[-1].run_id
    run: RunRecord | None = view.find(name)
    seen: Snapshot = {"run": name}
    answered_s = time.monotonic()
    with Screen(sys.stdout) as screen:
        # A run that is over is taken off the list.
        while run is not None:
            try:
                seen = view.snapshot(run)
                screen.show(seen)
                if run.state in _OVER:
                    return
                time.sleep(_WATCH_S)
                run = view.registry.get(name)
                answered_s = time.monotonic()
            except TransportError as error:
                if resolve_urls() is None:
                    screen.say("the Redis of this machine has ended, and what ran with it")
                    return
                if time.monotonic() - answered_s > _PATIENCE_S:
                    raise
                screen.show({**seen, "stage": "unknown", "note": str(error)})
                time.sleep(_WATCH_S)
        screen.say("the run is over")


def _place(learner: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in learner.items()) or "unknown"
