"""`clawq redis start | stop | status`: the two Redis servers that come with clawq, without a run.

`start` stays in the foreground (use `&`, tmux or systemd for the background), because the servers end with the process
that started them; that is what keeps orphans from piling up. It writes the host's state file, so that everything else
on this machine finds the servers; for other machines it prints the two variables to set there.
"""

import os
import signal
import threading
from pathlib import Path

import click

#: Time that `stop` gives the owner of the servers to end them.
_STOP_S = 15.0


@click.group()
def redis() -> None:
    """Start or stop the two Redis servers that come with clawq."""


@redis.command()
@click.option("--tcp", is_flag=True, help="Let other machines in: TCP with a random password.")
@click.option("--memory-mb", default=1024, show_default=True, type=click.IntRange(64), help="Of the data server.")
@click.option("--folder", type=click.Path(path_type=Path), help="For the broker's file and the logs.")
def start(tcp: bool, memory_mb: int, folder: Path | None) -> None:
    """Start broker and data server; they run until Ctrl-C or `clawq redis stop`."""
    from clawq.errors import StoreUnavailable, UserError
    from clawq.state import ServerState, state_dir
    from clawq.transport.server import EmbeddedRedis

    if other := ServerState.read():
        raise UserError(f"clawq's Redis already runs on this machine (process {other.pid})")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with EmbeddedRedis.start(folder or state_dir() / "redis", memory_mb, tcp=tcp) as servers:
        ServerState.of(servers.broker_url, servers.data_url).write()
        try:
            click.echo("Redis runs; Ctrl-C ends it. Workers and runs on this machine find it by themselves.")
            if tcp:
                click.echo("On other machines set (this is a secret, anybody who has it can use the servers):")
            click.echo(f"  export CLAWQ_BROKER_URL='{servers.broker_url}'")
            click.echo(f"  export CLAWQ_DATA_URL='{servers.data_url}'")
            while not stop.wait(1.0):
                dead = [process for process in servers.processes if process.poll() is not None]
                if dead:
                    raise StoreUnavailable(f"a Redis server ended by itself (status {dead[0].returncode}); see its log")
        finally:
            ServerState.forget()


@redis.command()
def stop() -> None:
    """Stop the servers that `clawq redis start` runs on this machine."""
    from clawq.errors import ClawqError, UserError
    from clawq.state import ServerState

    state = ServerState.read()
    if state is None:
        click.echo("no Redis of clawq runs on this machine")
        return
    if state.owner != "redis":
        raise UserError(f"these servers belong to {state.owner} (process {state.pid}) and end with it; stop that")
    # The pid is right: `read` has compared the start time, which a reused pid does not have.
    os.kill(state.pid, signal.SIGTERM)
    if not _ended(state.pid, state.started):
        raise ClawqError(f"process {state.pid} is still there after {_STOP_S:g} s; it may be finishing a run")
    click.echo("stopped")


@redis.command()
def status() -> None:
    """Show where Redis is, and whether both servers answer and are fit."""
    from clawq.amounts import bytes_text
    from clawq.errors import UserError
    from clawq.state import resolve_urls
    from clawq.transport.client import check_server, connect, max_memory_bytes, redact

    urls = resolve_urls()
    if urls is None:
        raise UserError("no clawq Redis is known on this machine; start one with `clawq redis start`")
    for role, url in zip(("broker", "data"), urls, strict=True):
        client = connect(url)
        version = ".".join(map(str, check_server(client, role)))
        memory = max_memory_bytes(client)
        limit = f"{bytes_text(memory)} at most" if memory else "no memory limit"
        click.echo(f"{role:<7}{redact(url)}  version {version}, {limit}")


def _ended(pid: int, started: str) -> bool:
    import time

    from clawq.state import process_start

    deadline = time.monotonic() + _STOP_S
    while process_start(pid) == started:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
