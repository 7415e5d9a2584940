"""`clawq log show RUN SLOT EPOCH-SEQ`: one fragment in full: header, columns, episodes, and what became of it."""

import json
import re
from typing import Any

import click

from clawq.amounts import bytes_text
from clawq.cli.tables import show_table
from clawq.cli.times import shown

_ID = re.compile(r"\d{1,19}-\d{1,19}")


@click.command()
@click.argument("run")
@click.argument("slot")
@click.argument("fragment", metavar="EPOCH-SEQ")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def show(run: str, slot: str, fragment: str, as_json: bool) -> None:
    """Show one fragment of RUN: who made it, what its columns hold, where it is, what became of it."""
    facts = _facts(run, slot, *parse_fragment(fragment))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)


def parse_fragment(text: str) -> tuple[int, int]:
    """`EPOCH-SEQ` as numbers; UsageError if it is none."""
    if not _ID.fullmatch(text):
        raise click.UsageError(f"{text!r} is no id of a fragment; write EPOCH-SEQ as `clawq log ls` shows it")
    epoch, _, seq = text.partition("-")
    return int(epoch), int(seq)


def _facts(run: str, slot: str, epoch: int, seq: int) -> dict[str, Any]:
    from clawq.errors import LogGone
    from clawq.programs.logbook import fate, fragment_facts, header_facts, open_logbook
    from clawq.replay.validation import Fault

    book = open_logbook(run)
    places = book.log.find(slot, epoch, seq)
    if not places:
        raise LogGone(f"the log does not hold fragment {slot} {epoch}-{seq}; {book.log.describe([slot])}")
    entry = book.log.get(slot, epoch, seq)
    facts = header_facts(places[0], entry.payload)
    facts["place"] = " and ".join(found.place for found in places)
    found = book.examiner.examine(entry)
    if isinstance(found, Fault):
        facts["refused"] = {"reason": found.reason, "detail": found.detail}
    else:
        facts |= fragment_facts(found)
    facts["fate"] = fate(book, slot, epoch, seq)
    return facts


def _print(facts: dict[str, Any]) -> None:
    rows = [
        ("fragment", f"{facts['slot']} {facts['id']}"),
        ("made", shown(facts["made_ms"]) if facts["made_ms"] else "unknown"),
        ("in", f"{facts['place']} ({bytes_text(facts['bytes'])})"),
        ("fate", facts["fate"] or "not known"),
    ]
    if "unreadable" in facts:
        rows.append(("unreadable", facts["unreadable"]))
    else:
        rows += _header_rows(facts)
    if "refused" in facts:
        rows.append(("refused", f"{facts['refused']['reason']}: {facts['refused']['detail']}"))
    for label, text in rows:
        click.echo(f"{label:<12}{text}")
    if "columns" in facts:
        click.echo()
        cells = [_column_cells(name, one) for name, one in facts["columns"].items()]
        show_table(("column", "shape", "dtype", "least", "mean", "largest"), cells, ("least", "mean", "largest"))
    for one in facts.get("episode_ends", ()):
        success = "" if one["success"] is None else f", success {one['success']:g}"
        click.echo(f"episode of env {one['env']} ended: {one['length']} steps, return {one['return']:g}{success}")
    for one in facts.get("voided_rows", ()):
        click.echo(f"takes back rows of env {one['env']} from fragment {one['seq']}, t {one['t']} on")


def _header_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    dropped = ", ".join(f"{count} {reason}" for reason, count in facts["dropped"].items()) or "none"
    version = facts["clawq"] or "unknown"
    return [
        ("worker", facts["worker"] + (f" on {facts['host']}" if facts["host"] else "")),
        ("environment", f"{facts['env'] or 'unknown'} (fingerprint {facts['env_fingerprint']}), seed {facts['seed']}"),
        ("weights", f"version {facts['weights_version']}"),
        ("clawq", version + (f", commit {facts['commit']}" if facts["commit"] else "")),
        ("steps", f"{facts['steps']} of {facts['envs']} envs"),
        ("so far", f"{facts['produced']} env steps made by this actor (since {facts['life']}), dropped: {dropped}"),
    ]


def _column_cells(name: str, one: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(map(str, one["shape"]))
    if "true" in one:
        return (name, shape, one["dtype"], "", f"{one['true']} true", "")
    numbers = [f"{one[key]:.4g}" if key in one else "-" for key in ("least", "mean", "largest")]
    if one["not_finite"]:
        numbers[2] += f" ({one['not_finite']} not finite)"
    return (name, shape, one["dtype"], *numbers)
