"""`clawq reader ls | drop`: who reads a run's streams, and whom trimming and actors wait for."""

import time

import click


@click.group()
def reader() -> None:
    """Show who reads a run's streams, or give up a reader's claim on them."""


@reader.command()
@click.argument("run_id", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def ls(run_id: str, as_json: bool) -> None:
    """List the readers of RUN."""
    import json
    from dataclasses import asdict

    from clawq.amounts import bytes_text
    from clawq.cli.screen import duration
    from clawq.cli.status import View
    from clawq.transport.registry import Readers

    view = View(run_id)
    run = view.find(run_id)
    records, board = Readers(view.data, run.keys).list(), view.snapshot(run)
    if as_json:
        click.echo(json.dumps([asdict(record) for record in records], indent=2))
        return
    for record in records:
        figures = [board.get(f"reader/{record.name}/{what}_bytes") for what in ("unread", "uncheckpointed")]
        told = [bytes_text(float(value)) for value in figures if isinstance(value, int | float)]
        behind = f"; {told[0]} unread, {told[1]} not checkpointed" if len(told) == 2 else ""
        role = "required" if record.required else "optional"
        since = duration(max(0.0, time.time() - record.since_ms / 1000))
        click.echo(f"{record.name}  {role}, since {since}, {record.holder or 'not there'}{behind}")


@reader.command()
@click.argument("run_id", metavar="RUN")
@click.argument("name", metavar="NAME")
def drop(run_id: str, name: str) -> None:
    """Give up the claim of reader NAME on the log of RUN: nobody waits for it any more.

    What it has not checkpointed may then be trimmed. A reader that is alive ends when it notices.
    """
    from clawq.amounts import bytes_text
    from clawq.cli.status import View
    from clawq.errors import UserError
    from clawq.transport.control import Events
    from clawq.transport.keys import LEARNER
    from clawq.transport.registry import Readers

    view = View(run_id)
    run = view.find(run_id)
    readers = Readers(view.data, run.keys)
    records = {record.name: record for record in readers.list()}
    if name == LEARNER:
        raise UserError(f"a run's own learner cannot be dropped; stop it with `clawq learner stop {run_id}`")
    if name not in records:
        raise UserError(f"run {run_id} has no reader {name!r}; there are {', '.join(records) or 'none'}")
    readers.leave(name)
    record = records[name]
    left = view.snapshot(run).get(f"reader/{name}/uncheckpointed_bytes")
    facts = {"reader": name, "required": record.required, "uncheckpointed_bytes": left}
    Events(view.data, run.keys).append("reader_dropped", **facts)
    told = f"; {bytes_text(float(left))} that it had not checkpointed may be trimmed" if left is not None else ""
    click.echo(f"dropped {name}{told}")
