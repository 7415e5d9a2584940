"""`clawq log ls RUN`: the fragments of a run, oldest first, each with where it comes from."""

import json
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from clawq.amounts import bytes_text
from clawq.cli.tables import show_table
from clawq.cli.times import milliseconds, shown

if TYPE_CHECKING:
    from clawq.programs.logbook import Logbook

_HEADER = ("made", "slot", "id", "worker", "weights", "steps", "bytes", "in", "clawq")


@click.command()
@click.argument("run")
@click.option("--slot", "slots", multiple=True, help="Only this slot; may be given several times.")
@click.option("--worker", help="Only fragments of this worker.")
@click.option("--since", help="Made at or after this time: 2026-11-29T21:00, or 15m (ago; s, m, h, d).")
@click.option("--until", help="Made before this time.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="The newest so many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, one object a line.")
def ls(
    run: str,
    slots: tuple[str, ...],
    worker: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List fragments of RUN (a name, or a run folder), from its streams and its archive.

    Times are by the clocks of the actors' hosts. Workers, commits and so on are what the fragments say of themselves.
    """
    from clawq.programs.logbook import open_logbook

    book, now_s = open_logbook(run), time.time()
    since_ms = milliseconds("since", since, now_s) if since else None
    until_ms = milliseconds("until", until, now_s) if until else None
    if slots:
        book.log.require(None, slots)
    newest = deque(_rows(book, slots, worker, since_ms, until_ms), maxlen=limit)
    if as_json:
        for facts in newest:
            click.echo(json.dumps(facts))
    elif newest:
        show_table(_HEADER, [_cells(facts) for facts in newest], right=("weights", "steps", "bytes"))
    else:
        click.echo(f"no fragments match; {book.log.describe()}")
    if not as_json:
        _print_sums(book)


def _rows(
    book: "Logbook", slots: tuple[str, ...], worker: str | None, since_ms: int | None, until_ms: int | None
) -> Iterator[dict[str, Any]]:
    from clawq.programs.logbook import header_facts

    for found in book.log.find_all(slots or None, since_ms, until_ms):
        entry = book.log.load(found)
        if entry is None:
            continue
        facts = header_facts(found, entry.payload)
        if worker is None or facts.get("worker") == worker:
            yield facts


def _cells(facts: dict[str, Any]) -> tuple[str, ...]:
    if "unreadable" in facts:
        told = (facts["unreadable"], "", "")
    else:
        told = (facts["worker"], str(facts["weights_version"]), f"{facts['steps']}x{facts['envs']}")
    version = "@".join(filter(None, (facts.get("clawq"), facts.get("commit"))))
    made = shown(facts["made_ms"]) if facts["made_ms"] else "-"
    return (made, facts["slot"], facts["id"], *told, bytes_text(facts["bytes"]), facts["place"], version)


def _print_sums(book: "Logbook") -> None:
    held = book.log.held()
    archived, streamed = sum(one.archived for one in held.values()), sum(one.streamed for one in held.values())
    parts = [f"{streamed} fragments in the streams"] if book.streams else ["no streams here"]
    parts += [f"{archived} in the archive {book.archive}"] if book.archive is not None else []
    click.echo(f"{', '.join(parts)}; {len(held)} slots")
    if book.archive is not None and book.log.archive_dropped:
        click.echo(f"{book.log.archive_dropped} older ones went with the archive's oldest segments (archive.bytes)")
    for loss in book.log.damages():
        click.echo(f"damaged: {loss}", err=True)
