"""`clawq learner start | stop | status`: the learner daemon of a run whose workers are elsewhere."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clawq.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from clawq.programs.daemon import Order

#: How long `stop` waits for the learner to write its checkpoint and leave, seconds.
STOP_S = 20.0


@click.group()
def learner() -> None:
    """Start or stop a learner that uses workers elsewhere."""


@learner.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run_id", help="Name of the run; default: made from the configuration's name and the time.")
@click.option("--follow", metavar="RUN", help="Learn from the experience of RUN instead of having actors.")
@click.option("--reader", metavar="NAME", help="With --follow: name among RUN's readers; default: the run's own.")
@click.option("--required", is_flag=True, help="With --follow: RUN's streams and actors wait for this learner.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with the run in this folder.")
@click.option("--or-resume", is_flag=True, help="With --run: go on with that run if it has begun (for services).")
def start(
    config: str | None,
    overrides: tuple[str, ...],
    run_id: str | None,
    follow: str | None,
    reader: str | None,
    required: bool,
    resume: Path | None,
    or_resume: bool,
) -> int:
    """Train CONFIG with whatever workers serve this Redis; ends when the budget is spent.

    Nobody resumes it should it be killed or hang: under systemd do (ops/systemd), or resume it yourself.
    """
    # Before the imports below, which take long enough to be interrupted.
    stop = stop_on_signals()
    from clawq.programs.daemon import run_daemon

    if follow is None and (reader is not None or required):
        raise click.UsageError("--reader and --required need --follow RUN")
    if or_resume and (run_id is None or resume is not None):
        raise click.UsageError("--or-resume needs --run NAME, and no --resume")
    if follow is not None:
        named = () if reader is None else (f"source.reader={reader}",)
        overrides = (*overrides, f"source.run={follow}", *named, f"source.required={str(required).lower()}")
    order = _order(config, overrides, run_id, resume)
    report = run_daemon(order.or_resumed() if or_resume else order, stop, click.echo)
    click.echo(f"ended: {report['ended']}")
    for name, file in report.get("pictures", {}).items():
        click.echo(f"{name}: {file}")
    click.echo(f"run folder: {report['folder']}")
    return 1 if report.get("incomplete") else 0


def _order(config: str | None, overrides: tuple[str, ...], run_id: str | None, resume: Path | None) -> "Order":
    from clawq.config_file import load_config
    from clawq.programs.daemon import Order

    file, overrides = config_file(config, overrides, resume)
    return Order(load_config(file, overrides), run_id, resume)


def config_file(config: str | None, overrides: tuple[str, ...], resume: Path | None) -> tuple[str, tuple[str, ...]]:
    """(file, overrides) that are meant: a run that is resumed has a configuration of its own, unless one is given.

    Raises:
        UserError: `resume` is no run folder.
    """
    from clawq.programs.run import check_run_folder

    if resume is not None:
        check_run_folder(resume)
        if config is None or ("=" in config and not Path(config).exists()):
            return str(resume / "config.yaml"), overrides if config is None else (config, *overrides)
    if config is None:
        raise click.UsageError("give a CONFIG, or --resume FOLDER")
    return config, overrides


@learner.command()
@click.argument("run_id", metavar="RUN")
def stop(run_id: str) -> None:
    """Stop the learner of RUN, wherever it runs; it writes a checkpoint first."""
    from clawq.cli.status import View
    from clawq.errors import ClawqError
    from clawq.transport.control import Orders

    view = View(run_id)
    run = view.find_at_work(run_id)
    Orders(view.data, run.keys).append("stop_wanted")
    deadline = time.monotonic() + STOP_S
    while view.registry.get(run_id) is not None:
        if time.monotonic() > deadline:
            raise ClawqError(
                f"the learner of {run_id} ({run.learner.get('host')}, pid {run.learner.get('pid')}) did not stop "
                f"within {STOP_S:g} s. If it was killed, remove what it left: `clawq learner forget {run_id}`"
            )
        time.sleep(0.1)
    click.echo("stopped")


@learner.command()
@click.argument("run_id", metavar="RUN")
def forget(run_id: str) -> None:
    """Take a run whose learner was killed off the list; refused while the learner lives."""
    from clawq.cli.status import View
    from clawq.errors import UserError
    from clawq.transport.claims import holder_of

    view = View(run_id)
    run = view.find(run_id)
    holder = holder_of(view.data, run.keys.claim("learner"))
    if holder is not None:
        raise UserError(f"run {run_id} is alive: {holder}")
    view.registry.remove(run_id)
    click.echo(f"forgot {run_id}; its streams are kept, resume it with --resume {run.learner.get('folder', 'FOLDER')}")


@learner.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.pass_context
def status(ctx: click.Context, run_id: str | None) -> None:
    """Show the runs and their learners (the same as `clawq status`)."""
    from clawq.cli.status import status as show

    ctx.invoke(show, run_id=run_id)
