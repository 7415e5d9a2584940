"""`clawq tune RUN KEY=VALUE ...`: settings of a run changed while it goes on.

The change travels as an event of the run. The learner judges it again, lets it take effect between two updates, keeps
it in the run folder (so that a resume keeps it) and answers; the command waits for that answer. If none comes in time
the change is withdrawn: a learner that reads it later leaves it alone.
"""

import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from clawq.cli.status import View
    from clawq.transport.control import Event, RunRecord

#: How long the learner may take to answer, seconds.
ANSWER_S = 15.0


@click.command()
@click.argument("run_id", metavar="RUN")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--timeout", "timeout_s", default=ANSWER_S, show_default=True, help="Seconds to wait for the learner.")
def tune(run_id: str, words: tuple[str, ...], timeout_s: float) -> None:
    """Change settings of RUN while it goes on; without KEY=VALUE show what can be changed."""
    from clawq.cli.status import View
    from clawq.config import RunConfig
    from clawq.config_live import changed, live_values

    view = View(run_id)
    run = view.find_at_work(run_id) if words else view.find(run_id)
    config = RunConfig.model_validate(run.config)
    if not words:
        for key, value in live_values(config).items():
            click.echo(f"{key}={'null' if value is None else value}")
        return
    changed(config, words)
    answer = ask(view, run, words, timeout_s)
    if answer.kind == "tune_refused":
        from clawq.errors import ConfigError

        raise ConfigError("clawq tune", [str(mistake) for mistake in answer.facts.get("mistakes", [])])
    _tell(words, answer.facts)


def ask(view: "View", run: "RunRecord", words: tuple[str, ...], timeout_s: float) -> "Event":
    """The learner's answer. Raises ClawqError if none comes in time."""
    from clawq.errors import ClawqError
    from clawq.transport.control import Events, Orders

    events, orders = Events(view.data, run.keys), Orders(view.data, run.keys)
    after = events.newest_id()
    wanted = orders.append("tune_wanted", set=list(words))
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        for event in events.read(after, min(left_s, 1.0)):
            after = event.id
            if event.kind in ("tuned", "tune_refused") and event.facts.get("id") == wanted:
                return event
    orders.append("tune_withdrawn", id=wanted)
    raise ClawqError(
        f"the learner of {run.run_id} ({run.learner.get('host')}, pid {run.learner.get('pid')}) did not answer within "
        f"{timeout_s:g} s; the change is withdrawn. It may be starting, or stuck: see `clawq status {run.run_id}`"
    )


def _tell(words: tuple[str, ...], facts: dict[str, Any]) -> None:
    changes = facts.get("changes", {})
    for key, (old, new) in changes.items():
        click.echo(f"{key}: {_shown(old)} -> {_shown(new)}")
    for key in (word.partition("=")[0] for word in words):
        if key not in changes:
            click.echo(f"{key}: is that already")
    if facts.get("unkept"):
        click.echo(f"warning: {facts['unkept']}", err=True)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
