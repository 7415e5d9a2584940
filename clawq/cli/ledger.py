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
@click.option("--reader", help="Whose ledger; default: the learner's and all other readers'.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def ledger(run: str, reader: str | None, as_json: bool) -> int:
    """Balance the ledger of RUN (a name, or a run folder): acknowledged = inserted + in stream + rejected + gap.

    Works while the run goes on, and from its folder after it ended or was killed. Exit status 0 if everything is
    accounted for, 1 if not. Each reader has its own: of a required one nothing may be missing, of an optional one it is
    told what it missed.
    """
    from clawq.errors import UserError
    from clawq.programs.audit import audit, others
    from clawq.programs.whereabouts import find_run
    from clawq.transport.keys import LEARNER

    where = find_run(run)
    found = audit(where.data, where.keys, where.folder, reader or LEARNER)
    if found is None:
        raise UserError(f"run {where.run_id} has no ledger of {reader or LEARNER!r}: nothing published, no checkpoint")
    more = others(where.data, where.keys, where.folder) if reader is None else []
    if as_json:
        facts = found.to_json() | ({"readers": [one.to_json() for one in more]} if reader is None else {})
        click.echo(json.dumps({"run": where.run_id, **facts}, indent=2))
    else:
        for one in (found, *more):
            for line in [*([] if one is found else [""]), *lines(where.run_id, one)]:
                click.echo(line)
    return 1 if any(one.problems() for one in (found, *more)) else 0


def lines(run_id: str, found: "Balance") -> list[str]:
    """The balance as text."""
    sums = found.sums
    if not sums and not found.rows:
        return [f"{run_id}, reader {found.reader}, {found.source}"]
    told = [f"{run_id}, reader {found.reader}, {found.source}", "fragments"]
    told += _column([("acknowledged", found.acknowledged)])
    parts: list[tuple[str, int]] = [("inserted", sums.get("committed", 0))]
    parts += [(f"rejected: {reason}", count) for reason, count in sorted(sums.get("rejected", {}).items())]
    parts += [("duplicates", sums["duplicates"])] if sums.get("duplicates") else []
    parts += [("deleted with the run, unread" if found.finished else "still in the streams", found.in_stream)]
    parts += [(f"gap: {reason}", count) for reason, count in sorted(sums.get("gaps", {}).items())]
    told += _column(parts, sign="=")
    if found.earlier:
        told.append(f"  ({found.earlier} of them in streams that are gone, by the reader's own count)")
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
    from clawq.programs.balance import GONE

    shown = found.wrong or (*found.rows[:_MOST_SLOTS], *(row for row in found.rows[_MOST_SLOTS:] if row.slot == GONE))
    if not shown:
        return []
    names = {row.slot: "(swept away)" if row.slot == GONE else row.slot for row in shown}
    width = max(map(len, names.values()))
    told = [f"{'slot':{width}}  acknowledged  settled  in stream  gap  difference"]
    for row in shown:
        acknowledged = "?" if row.acknowledged is None else str(row.acknowledged)
        told.append(
            f"{names[row.slot]:{width}}  {acknowledged:>12}  {row.settled:>7}  {row.in_stream:>9}  {row.gap:>3}  "
            f"{row.difference:>10}"
        )
    if not found.wrong and len(found.rows) > len(shown):
        told.append(f"... and {len(found.rows) - len(shown)} slots more")
    return told


def _column(parts: list[tuple[str, int]], sign: str = " ") -> list[str]:
    """`= 12  inserted` and `+ 3  duplicates` below it."""
    signs = [sign, *(["+"] * len(parts))]
    return [f"  {mark} {count:>10}  {name}" for mark, (name, count) in zip(signs, parts, strict=False)]
