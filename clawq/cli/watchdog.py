"""`clawq watchdog start | status | explain`: the watchdog of this machine."""

import click


@click.group()
def watchdog() -> None:
    """End what hangs, leaks or was left behind on this machine, and say why."""


@watchdog.command()
@click.option("--dry-run", is_flag=True, help="Decide and write down, touch nobody.")
@click.option(
    "--period", default=1.0, show_default=True, type=click.FloatRange(0.1, 60.0), help="Seconds between looks."
)
@click.option("--kills-per-minute", type=click.IntRange(0), help="More is alarm only. Default: 2, or a tenth of all.")
def start(dry_run: bool, period: float, kills_per_minute: int | None) -> None:
    """Watch until SIGTERM or Ctrl-C. `clawq worker start` and `clawq up` start one by themselves.

    There is one for each machine and user: a second one steps back.
    """
    import logging
    import sys

    from clawq.cli.signals import stop_on_signals
    from clawq.spawning.logfile import log_level
    from clawq.watchdog.daemon import AlreadyWatched, watch
    from clawq.watchdog.policy import Policy

    logging.basicConfig(level=log_level("INFO"), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    stop = stop_on_signals()
    try:
        watch(Policy(period_s=period, kills_per_minute=kills_per_minute), dry_run, stop)
    except AlreadyWatched as error:
        click.echo(str(error))


@watchdog.command()
def status() -> None:
    """Show the processes of clawq on this machine, what is wrong with them, and what was ended so far."""
    from clawq.registry import Registry
    from clawq.watchdog.audit import Audit
    from clawq.watchdog.daemon import watchdog_pid
    from clawq.watchdog.explain import overview
    from clawq.watchdog.policy import Policy

    registry = Registry()
    pid = watchdog_pid(registry)
    click.echo(f"watchdog    pid {pid}" if pid else "watchdog    none runs; start one with `clawq watchdog start`")
    for name, progress, memory, verdict in overview(registry, Policy()):
        click.echo(f"{name}\n  progress  {progress}\n  memory    {memory}\n  verdict   {verdict}")
    reaped = Audit(registry.folder).reaped()
    for reason, count in sorted(reaped.items()):
        click.echo(f'workers_reaped_total{{reason="{reason}"}} {count}')
    for place, why in sorted(registry.unfit().items()):
        click.echo(f"given up    {place}: {why}")
    if reaped:
        click.echo(f"reports     {registry.folder / 'reports'}")


@watchdog.command()
@click.argument("pid", type=click.IntRange(min=1))
def explain(pid: int) -> None:
    """Say what the watchdog knows of process PID, which rule would apply to it, and why."""
    from clawq.registry import Registry
    from clawq.watchdog.explain import explain as lines
    from clawq.watchdog.policy import Policy

    for line in lines(pid, Registry(), Policy()):
        click.echo(line)


__all__ = ["watchdog"]
