"""`clawq replay RUN`: train a learner from a recorded log, without simulator, workers or Celery."""

import sys
from typing import Any

import click

from clawq.cli.signals import stop_on_signals


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--from", "begin", metavar="WHERE", help="Begin there: fragment:N, a number of env steps, or a time.")
@click.option("--to", "end", metavar="WHERE", help="End before that.")
@click.option("--seed", type=click.IntRange(0), help="Another seed.")
@click.option("--run", "name", help="Name of the new run.")
def replay(
    run: str, overrides: tuple[str, ...], begin: str | None, end: str | None, seed: int | None, name: str | None
) -> int:
    """Train again from what RUN (a name, or a run folder) recorded.

    With nothing changed its schedule is followed, and the result compared with its checkpoints, bit for bit.
    With KEY=VALUE, --seed or a range the recorded fragments come in their order, and updates as the rate limiter allows
    or in the recorded ratio. The new run folder holds metrics, checkpoint, weights and report.

    WHERE is fragment:120 (the 120th that was learned from), 40000 (env steps), 22:15, 22:15:30 or 2026-11-29T22:15:30.
    """
    stop = stop_on_signals()
    from clawq.cli.screen import Screen
    from clawq.programs.recording import open_recording
    from clawq.programs.rerun import Order, rerun
    from clawq.programs.whereabouts import find_run

    recording = open_recording(find_run(run))
    with Screen(sys.stdout) as screen:
        report = rerun(recording, Order(overrides, seed, begin, end, name), screen, stop)
    for line in lines(report):
        click.echo(line)
    return 1 if report.get("difference") or report.get("final_weights", "identical") != "identical" else 0


def lines(report: dict[str, Any]) -> list[str]:
    """What came of it."""
    losses = ", ".join(f"{name} {value:.4g}" for name, value in report["losses"].items()) or "none"
    told = [
        f"{report['updates']} updates from {report['fragments']} fragments in {report['seconds']:g} s, "
        f"{report['updates_per_s']:g} updates/s; {report['ended']}",
        f"last losses: {losses}",
    ]
    if report["mode"] == "exact":
        told += _comparison(report)
    return [*told, f"run folder: {report['folder']}"]


def _comparison(report: dict[str, Any]) -> list[str]:
    upto = report["identical_upto"]
    if report["difference"]:
        told = [f"FIRST DIFFERENCE {report['difference']}", f"identical up to update {upto}" if upto else ""]
    elif upto is None:
        told = ["the recording has no checkpoint or final weights to compare with"]
    else:
        told = [f"identical up to update {upto}"]
    if report.get("final_weights") == "identical":
        told.append("final weights: identical, bit for bit")
    elif report.get("final_weights"):
        told.append(f"FINAL WEIGHTS DIFFER: {report['final_weights']}")
    return [line for line in [*told, report.get("note", "")] if line]
