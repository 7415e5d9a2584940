"""`clawq log quarantine RUN ...`: never learn from a worker's or an interval's experience again, while the run goes on.

The command asks the learner and waits for its answer; what the learner does is in clawq.programs.quarantine.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any

import click

from clawq.cli.times import milliseconds, shown

#: How long the learner may take to answer, seconds: it reads its events once a second, between two updates.
ANSWER_S = 30.0


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--worker", help="The experience of this worker (names as `clawq log ls` shows them).")
@click.option("--slot", help="The experience of this slot.")
@click.option("--epoch", type=int, help="With --slot: only of this incarnation of its actor.")
@click.option("--from", "first_seq", type=int, help="With --epoch: from this fragment on.")
@click.option("--to", "last_seq", type=int, help="With --epoch: up to this fragment.")
@click.option("--since", help="Fragments made at or after this time: 2026-11-29T21:00, or 15m (ago; s, m, h, d).")
@click.option("--until", help="Fragments made before this time.")
@click.option("--reason", default="", help="Why; shown by --list.")
@click.option("--list", "show", is_flag=True, help="Show the rules of RUN.")
@click.option("--lift", type=int, metavar="ID", help="Take later fragments again; what was masked stays masked.")
def quarantine(run_id: str, show: bool, lift: int | None, **named: Any) -> None:
    """Never sample the matching experience of RUN again.

    Rows in the ring are masked at once; matching fragments that come later are refused and counted. Times are by the
    clocks of the actors' hosts. The normaliser has seen what is masked, and updates made from it stay made.
    """
    named = {name: value for name, value in named.items() if value not in (None, "")}
    if sum((show, lift is not None, bool(named))) != 1:
        raise click.UsageError("name what to quarantine (--worker, --slot, --since, ...), or give --list or --lift ID")
    if show:
        _print_rules(_ask(run_id, {"op": "list"})["rules"])
    elif lift is not None:
        _ask(run_id, {"op": "lift", "id": lift})
        click.echo(f"lifted {lift}: later fragments are taken again; what was masked stays masked")
    else:
        _add(run_id, named)


def _add(run_id: str, named: dict[str, Any]) -> None:
    from clawq.replay.quarantine import Rule

    now_s = time.time()
    for option, name in (("since", "since_ms"), ("until", "until_ms")):
        if option in named:
            named[name] = milliseconds(option, named.pop(option), now_s)
    Rule.of_facts(named)
    answer = _ask(run_id, {"op": "add", **named})
    click.echo(
        f"quarantine {answer['id']}: {answer['env_steps']} env steps of {answer['fragments']} fragments in the ring "
        "are masked; matching fragments that come later are refused"
    )
    for line in notes(named, answer.get("unknown", {})):
        click.echo(line, err=True)
    click.echo(f"undo: clawq log quarantine {run_id} --lift {answer['id']}")


def notes(named: Mapping[str, Any], unknown: Mapping[str, list[str]]) -> list[str]:
    """What to say of names that the learner has never heard of."""
    return [
        f"note: nothing is known of a {what} {named.get(what)!r}; nearest: "
        f"{', '.join(near) or 'none is known at all'}. The rule stands, for what may come"
        for what, near in unknown.items()
    ]


def _ask(run_id: str, command: dict[str, Any]) -> dict[str, Any]:
    """Send a command to the learner; its answer.

    Raises:
        UserError: there is no such run, or the learner refuses.
        ClawqError: it did not answer.
    """
    from clawq.cli.status import View
    from clawq.errors import ClawqError, UserError
    from clawq.transport.control import Events, Orders

    view = View(run_id)
    keys = view.find_at_work(run_id).keys
    events = Events(view.data, keys)
    request, last = secrets.token_hex(8), events.newest_id()
    Orders(view.data, keys).append("quarantine_wanted", request=request, **command)
    deadline = time.monotonic() + ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        for event in events.read(last, min(left_s, 1.0)):
            last = event.id
            if event.kind == "quarantine" and event.facts.get("request") == request:
                if "error" in event.facts:
                    raise UserError(event.facts["error"])
                return event.facts
    raise ClawqError(
        f"the learner of {run_id} did not answer within {ANSWER_S:g} s; is it alive (`clawq status {run_id}`)? If so, "
        f"it may still do as it was told: see `clawq log quarantine {run_id} --list`"
    )


def _print_rules(rules: list[dict[str, Any]]) -> None:
    if not rules:
        click.echo("no quarantine")
    for rule in rules:
        words = [f"{name} {rule[name]}" for name in ("worker", "slot", "epoch") if rule[name]]
        words += [f"{name} {rule[f'{name}_seq']}" for name in ("first", "last") if rule[f"{name}_seq"] is not None]
        words += [f"{name} {shown(rule[f'{name}_ms'])}" for name in ("since", "until") if rule[f"{name}_ms"]]
        state = "in force" if rule["lifted"] is None else "lifted (what was masked stays masked)"
        click.echo(f"{rule['id']}  {', '.join(words)}  {state}" + (f"  {rule['reason']}" if rule["reason"] else ""))
