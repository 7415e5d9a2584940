"""`clawq log dlq ls | show | export | check`: the entries that the learner refused, and why."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clawq.amounts import bytes_text
from clawq.cli.log_show import parse_fragment
from clawq.cli.tables import show_table
from clawq.cli.times import shown

if TYPE_CHECKING:
    from clawq.programs.logbook import Logbook
    from clawq.transport.dead_letters import Letter


@click.group()
def dlq() -> None:
    """Show the dead letters of a run: entries that its learner refused, with the reasons."""


@dlq.command()
@click.argument("run")
@click.option("--reason", help="Only those refused for this reason.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="The newest so many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, one object a line.")
def ls(run: str, reason: str | None, limit: int, as_json: bool) -> None:
    """List the dead letters of RUN (a name, or a run folder).

    All are counted, the newest ~200 are kept. When Redis is gone, the archive is examined instead.
    """
    from clawq.programs.letters import letter_facts

    _, letters, counts, place = _open(run)
    chosen = [letter_facts(one) for one in letters if reason in (None, one.reason)][-limit:]
    if as_json:
        for facts in chosen:
            click.echo(json.dumps(facts))
        return
    if chosen:
        rows = [
            (shown(one["refused_ms"]) if one["refused_ms"] else "-", one["slot"], one["id"], one["reason"],
             bytes_text(one["bytes"]), (one["header"] or {}).get("worker", "?"), one["detail"])
            for one in chosen
        ]  # fmt: skip
        show_table(("refused", "slot", "id", "reason", "bytes", "worker", "why"), rows, right=("bytes",))
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
    click.echo(f"refused: {told}" + ("" if place == "redis" else " (found by examining the archive)"))


@dlq.command()
@click.argument("run")
@click.argument("slot")
@click.argument("fragment", metavar="EPOCH-SEQ")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def show(run: str, slot: str, fragment: str, as_json: bool) -> None:
    """Show one dead letter of RUN: why it was refused, what its header says, its first bytes."""
    from clawq.programs.letters import find_letter, letter_facts, whole_entry

    book, letters, _, _ = _open(run)
    letter = find_letter(letters, slot, *parse_fragment(fragment))
    payload = whole_entry(book, letter)
    facts = {**letter_facts(letter), "whole": payload is not None, "first_bytes": letter.head[:64].hex(" ", 4)}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    rows = [
        ("fragment", f"{facts['slot']} {facts['id']}"),
        ("refused", (shown(facts["refused_ms"]) + ", " if facts["refused_ms"] else "") + facts["reason"]),
        ("why", facts["detail"]),
        (
            "bytes",
            f"{facts['bytes']}, " + ("whole" if facts["whole"] else f"only the first {len(letter.head)} are kept"),
        ),
        ("begins", facts["first_bytes"]),
    ]
    rows += [(name, str(value)) for name, value in (facts["header"] or {}).items() if value not in ("", {})]
    if facts["header"] is None:
        rows.append(("header", "cannot be read"))
    for label, text in rows:
        click.echo(f"{label:<16}{text}")


@dlq.command()
@click.argument("run")
@click.argument("slot", required=False)
@click.argument("fragment", metavar="[EPOCH-SEQ]", required=False)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to be made.")
def export(run: str, slot: str | None, fragment: str | None, out: Path) -> int:
    """Write what is needed to look into a refusal elsewhere: the entry's bytes, and a JSON file with all about it.

    With SLOT and EPOCH-SEQ the bundle is OUT itself; without, OUT gets one for each dead letter that is kept.
    """
    from clawq.programs.letters import find_letter, write_bundle, write_bundles

    if (slot is None) != (fragment is None):
        raise click.UsageError("give SLOT and EPOCH-SEQ, or neither for all dead letters")
    book, letters, _, _ = _open(run)
    if slot is not None and fragment is not None:
        write_bundle(book, find_letter(letters, slot, *parse_fragment(fragment)), out)
        click.echo(f"{out}; see the refusal again, on any machine: clawq log dlq check {out}")
        return 0
    written = write_bundles(book, letters, out, lambda text: click.echo(text, err=True))
    click.echo(f"{len(written)} of {len(letters)} dead letters: {out}")
    return 0 if len(written) == len(letters) else 1


@dlq.command()
@click.argument("bundle", type=click.Path(path_type=Path))
def check(bundle: Path) -> int:
    """Examine the entry in BUNDLE as a learner does; status 0 if it is refused for the recorded reason, 1 if not."""
    from clawq.programs.letters import check_bundle

    found = check_bundle(bundle)
    if found.fault is None:
        click.echo(f"not refused here; recorded: {found.recorded} (by clawq {found.made_with})")
    else:
        click.echo(f"refused: {found.fault.reason}: {found.fault.detail}")
        if not found.reproduced:
            click.echo(f"recorded was another reason: {found.recorded} (by clawq {found.made_with})")
    return 0 if found.reproduced else 1


def _open(run: str) -> "tuple[Logbook, list[Letter], dict[str, int], str]":
    from clawq.programs.letters import read_letters
    from clawq.programs.logbook import open_logbook

    book = open_logbook(run)
    return book, *read_letters(book)
