"""`clawq up CONFIG`: train on this machine: Redis, worker, learner, all in one."""

import sys
from pathlib import Path

import click

from clawq.cli.signals import stop_on_signals


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run_id", help="Name of the run; default: made from the configuration's name and the time.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with the run in this folder.")
def up(config: str | None, overrides: tuple[str, ...], run_id: str | None, resume: Path | None) -> int:
    """Train CONFIG on this machine and end when its budget is spent; nothing is left running."""
    from clawq.cli.learner import config_file
    from clawq.cli.screen import Screen
    from clawq.config_file import load_config
    from clawq.programs.local import Household, LocalRun, run_local

    file, overrides = config_file(config, overrides, resume)
    order = LocalRun(load_config(file, overrides), (file, *overrides), resume, run_id)
    household = Household()
    stop = stop_on_signals(household.kill)
    with Screen(sys.stdout) as screen:
        return run_local(order, screen, stop, household)
