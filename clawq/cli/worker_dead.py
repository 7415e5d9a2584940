"""`clawq worker dead ls | show | retry | drop`: what workers have set aside, why, and what shall become of it.

A command that was begun three times and killed its worker each time is not tried any more, and neither is what arrives
in a queue and is no command, or names a task that the worker does not have. All are kept on the broker, for whoever
looks after the workers.
"""

import json
from typing import TYPE_CHECKING, Any

import click

from clawq.cli.tables import show_table
from clawq.cli.times import shown

if TYPE_CHECKING:
    from clawq.transport.commands import Commands, DeadCommand

#: How much of the arguments is shown in a list, characters.
_BRIEF = 60
#: Reason -> in words.
_WHY = {
    "attempts": "begun three times, and no worker lived to see its end",
    "unknown": "the worker had no such task; give it back once its plugin is installed there",
    "garbage": "it is no command",
}


@click.group()
def dead() -> None:
    """Show the commands that workers have set aside, and give them back or drop them."""


@dead.command()
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="The newest so many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, one object a line.")
def ls(limit: int, as_json: bool) -> None:
    """List the dead commands, newest last (the newest ~1000 are kept)."""
    commands, _ = _open()
    found = [_facts(one) for one in reversed(commands.dead(limit))]
    if as_json:
        for facts in found:
            click.echo(json.dumps(facts))
        return
    if not found:
        click.echo("no dead commands")
        return
    columns = ("id", "buried", "reason", "task", "queue", "worker")
    rows = [(*(facts[name] or "-" for name in columns), facts["arguments"][:_BRIEF]) for facts in found]
    show_table((*columns, "arguments"), rows)


@dead.command()
@click.argument("entry_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def show(entry_id: str, as_json: bool) -> None:
    """Show one dead command: why it was set aside, and what it was called with."""
    commands, _ = _open()
    facts = _facts(_find(commands, entry_id))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        told = f"{value}: {_WHY[value]}" if name == "reason" and value in _WHY else str(value)
        click.echo(f"{name.replace('_', ' '):<16}{told or '-'}")


@dead.command()
@click.argument("entry_ids", metavar="ID...", nargs=-1, required=True)
def retry(entry_ids: tuple[str, ...]) -> None:
    """Give dead commands back to the queues that they came from, with three attempts before them again."""
    from clawq.control.celery_settings import give_back, make_app

    commands, broker_url = _open()
    sender = make_app(broker_url)
    try:
        for one in [_find(commands, entry_id) for entry_id in entry_ids]:
            give_back(sender, commands, one)
            click.echo(f"{one.id}: given back to the queue {one.queue}")
    finally:
        sender.close()


@dead.command()
@click.argument("entry_ids", metavar="[ID...]", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that there are.")
def drop(entry_ids: tuple[str, ...], every: bool) -> None:
    """Drop dead commands for good."""
    from clawq.transport.commands import KEPT

    if bool(entry_ids) == every:
        raise click.UsageError("give the ids of dead commands (`clawq worker dead ls`), or --all")
    commands, _ = _open()
    # The bound is kept approximately.
    chosen = commands.dead(2 * KEPT) if every else [_find(commands, entry_id) for entry_id in entry_ids]
    dropped = sum(commands.drop(one.id) for one in chosen)
    click.echo(f"dropped: {dropped}")


def _open() -> "tuple[Commands, str]":
    """The books of commands, and where they are."""
    from clawq.errors import UserError
    from clawq.state import resolve_urls
    from clawq.transport.client import connect
    from clawq.transport.commands import Commands

    urls = resolve_urls()
    if urls is None:
        raise UserError("no clawq Redis is running on this machine; for one elsewhere set CLAWQ_BROKER_URL")
    return Commands(connect(urls[0])), urls[0]


def _find(commands: "Commands", entry_id: str) -> "DeadCommand":
    from clawq.errors import UserError
    from clawq.transport.commands import KEPT

    for one in commands.dead(2 * KEPT):
        if one.id == entry_id:
            return one
    raise UserError(f"there is no dead command {entry_id!r}; see `clawq worker dead ls`")


def _facts(one: "DeadCommand") -> dict[str, Any]:
    """What is known of a dead command, JSON-able; texts came over the wire, and are made printable."""
    from clawq.programs.logbook import printable

    facts = {name: printable(getattr(one, name)) for name in ("id", "reason", "task", "queue", "worker", "command")}
    arguments = printable(one.head.decode(errors="replace"))
    return {**facts, "buried": shown(one.buried_ms), "arguments": arguments, "can_be_given_back": bool(one.arguments())}


__all__ = ["dead"]
