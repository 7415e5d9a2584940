"""`clawq log ledger RUN`: what became of every fragment that Redis acknowledged, and whether the sums agree."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from clawq.programs.balance import Balance

#: Slots shown if all is well; of those that do not balance all are.
_MOST_SLOTS = 20


@click.command()
@click.argument("run")
@click.option("--reader", default="learner", show_default=True, help="Whose ledger.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def ledger(run: str, reader: str, as_json: bool) -> int:
    """Balance the ledger of RUN (a name, or a run folder): acknowledged = inserted + in stream + rejected + gap.

    Works while the run goes on, and from its folder after it ended or was killed. Exit status 0 if everything is
    accounted for, 1 if not.
    """
    from clawq.errors import UserError
    from clawq.programs.audit import audit
    from clawq.programs.whereabouts import find_run

    where = find_run(run)
    found = audit(where.data, where.keys, where.folder, reader)
    if found is None:
        raise UserError(f"run {where.run_id} has no ledger of {reader!r}: nothing published, no checkpoint")
    if as_json:
        click.echo(json.dumps({"run": where.run_id, **found.to_json()}, indent=2))
    else:
        for line in lines(where.run_id, found):
            click.echo(line)
    return 1 if found.problems() else 0


def lines(run_id: str, found: "Balance") -> list[str]:
    """The balance as text."""
    sums = found.sums
    told = [f"{run_id}, reader {found.reader}, {found.source}", "fragments"]
    told += _column([("acknowledged", found.acknowledged)])
    parts: list[tuple[str, int]] = [("inserted", sums.get("committed", 0))]
    parts += [(f"rejected: {reason}", count) for reason, count in sorted(sums.get("rejected", {}).items())]
    parts += [("duplicates", sums["duplicates"])] if sums.get("duplicates") else []
    parts += [("still in the streams", found.in_stream)]
    parts += [(f"gap: {reason}", count) for reason, count in sorted(sums.get("gaps", {}).items())]
    told += _column(parts, sign="=")
    if found.earlier:
        told.append(f"  ({found.earlier} of them by servers that are gone, by the reader's own count)")
    if any(row.acknowledged is None for row in found.rows):
        told.append("  (this Redis is older than 7 and does not count: acknowledged is what was seen)")
    told += _steps(sums)
    told += _slots(found)
    return told + ([f"WRONG: {problem}" for problem in found.problems()] or ["balances"])


def _steps(sums: Any) -> list[str]:
    if not sums.get("produced_steps"):
        return []
    parts = [("inserted", sums["committed_steps"])]
    parts += [(f"dropped: {reason}", count) for reason, count in sorted(sums["dropped_steps"].items())]
    parts += [(name, sums[f"{name}_steps"]) for name in ("refused", "missed", "unaccounted") if sums[f"{name}_steps"]]
    told = ["env steps", *_column([("produced", sums["produced_steps"])]), *_column(parts, sign="=")]
    lost = int(sums.get("lost_unacked", 0))
    bound = f"; actors that failed took at most {lost} unsent fragments with them" if lost else ""
    return [*told, f"  (by the actors' headers{bound})"]


def _slots(found: "Balance") -> list[str]:
    shown = found.wrong or found.rows[:_MOST_SLOTS]
    if not shown:
        return []
    width = max(len(row.slot) for row in shown)
    told = [f"{'slot':{width}}  acknowledged  settled  in stream  gap  difference"]
    for row in shown:
        acknowledged = "?" if row.acknowledged is None else str(row.acknowledged)
        told.append(
            f"{row.slot:{width}}  {acknowledged:>12}  {row.settled:>7}  {row.in_stream:>9}  {row.gap:>3}  "
            f"{row.difference:>10}"
        )
    if not found.wrong and len(found.rows) > len(shown):
        told.append(f"... and {len(found.rows) - len(shown)} slots more")
    return told


def _column(parts: list[tuple[str, int]], sign: str = " ") -> list[str]:
    """`= 12  inserted` and `+ 3  duplicates` below it."""
    signs = [sign, *(["+"] * len(parts))]
    return [f"  {mark} {count:>10}  {name}" for mark, (name, count) in zip(signs, parts, strict=False)]
