"""`clawq redis start | stop | status | acl`: the two Redis servers that come with clawq, without a run.

`start` stays in the foreground (use `&`, tmux or systemd for the background), because the servers end with the process
that started them; that is what keeps orphans from piling up. It writes the host's state file, so that everything else
on this machine finds the servers; for other machines it prints the lines to use there.
"""

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from clawq.transport.listening import Tcp
    from clawq.transport.server import EmbeddedRedis

#: Time that `stop` gives the owner of the servers to end them.
_STOP_S = 15.0


@click.group()
def redis() -> None:
    """Start or stop the two Redis servers that come with clawq."""


@redis.command()
@click.option("--tcp", is_flag=True, help="TCP with a password, on this machine; --bind lets other machines in.")
@click.option("--bind", metavar="ADDRESS", help="Listen there on TCP; 0.0.0.0 is every network of this machine.")
@click.option("--port", default=0, type=click.IntRange(0, 65_534), help="Of the broker; the data server's is the next.")
@click.option("--name", default="", help="How other machines call this one; default: its host name.")
@click.option("--password-file", type=click.Path(path_type=Path), help="Default: `password` in the folder.")
@click.option("--no-password", is_flag=True, help="With --tcp, on this machine only.")
@click.option("--acl", type=click.Path(path_type=Path, file_okay=False), help="Folder of `clawq redis acl`.")
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Encrypt; PEM file.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Its key.")
@click.option("--tls-ca", type=click.Path(path_type=Path, dir_okay=False), help="Who signed it.")
@click.option("--memory-mb", default=1024, show_default=True, type=click.IntRange(64), help="Of the data server.")
@click.option("--folder", type=click.Path(path_type=Path), help="For the broker's file and the logs.")
def start(memory_mb: int, folder: Path | None, **options: Any) -> None:
    """Start broker and data server; they run until Ctrl-C or `clawq redis stop`."""
    from clawq.errors import StoreUnavailable, UserError
    from clawq.state import ServerState, state_dir
    from clawq.transport.acl import read_passwords, write_env
    from clawq.transport.client import check_server, connect
    from clawq.transport.server import EmbeddedRedis

    if other := ServerState.read():
        raise UserError(f"clawq's Redis already runs on this machine (process {other.pid})")
    folder = folder or state_dir() / "redis"
    tcp = _tcp(folder, **options)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with EmbeddedRedis.start(folder, memory_mb, tcp=tcp) as servers:
        for role, url in (("broker", servers.broker_url), ("data", servers.data_url)):
            check_server(connect(url), role)
        variables = _elsewhere(servers, tcp)
        if tcp is not None and tcp.users is not None:
            # Before anybody can find the servers: who does finds the files too.
            write_env(tcp.users, read_passwords(tcp.users), variables)
        ServerState.of(servers.broker_url, servers.data_url).write()
        try:
            _tell(tcp, variables)
            while not stop.wait(1.0):
                dead = [process for process in servers.processes if process.poll() is not None]
                if dead:
                    raise StoreUnavailable(f"a Redis server ended by itself (status {dead[0].returncode}); see its log")
        finally:
            ServerState.forget()


def _tcp(
    folder: Path,
    tcp: bool,
    bind: str | None,
    port: int,
    name: str,
    password_file: Path | None,
    no_password: bool,
    acl: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
) -> "Tcp | None":
    """How to listen, None for socket files."""
    from clawq.transport.acl import read_passwords
    from clawq.transport.listening import LOOPBACK, Tcp, Tls, password_of

    files = [file for file in (tls_cert, tls_key, tls_ca) if file is not None]
    if len(files) not in (0, 3):
        raise click.UsageError("--tls-cert, --tls-key and --tls-ca belong together")
    if not (tcp or bind or acl or files):
        if port or name or password_file or no_password:
            raise click.UsageError("--port, --name, --password-file and --no-password need --tcp or --bind")
        return None
    tls = Tls(*files) if files else None
    address = bind or LOOPBACK
    if acl is not None:
        admin = read_passwords(acl).get("admin", "")
        return Tcp(address, port, name, tls=tls, users=acl, admin=("admin", admin))
    if no_password:
        return Tcp(address, port, name, tls=tls)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Tcp(address, port, name, password_of(password_file or folder / "password"), tls)


def _tell(tcp: "Tcp | None", variables: dict[str, str]) -> None:
    """Say how to use the servers, here and elsewhere."""
    click.echo("Redis runs; Ctrl-C ends it. Workers and runs on this machine find it by themselves.")
    if tcp is not None and tcp.users is not None:
        click.echo(f"Each machine gets one file of {tcp.users} (they are secrets), to be sourced before clawq is used:")
        click.echo("  worker NAME: NAME.env; learner: learner.env; who only looks: viewer.env")
    else:
        if tcp is not None and not tcp.local:
            click.echo("On other machines set (this is a secret, anybody who has it can use the servers):")
        for name, value in variables.items():
            click.echo(f"  export {name}='{value}'")
    if tcp is not None and tcp.tls is not None:
        click.echo(f"They need a copy of {tcp.tls.authority}, at the place that CLAWQ_REDIS_CA names.")


def _elsewhere(servers: "EmbeddedRedis", tcp: "Tcp | None") -> dict[str, str]:
    """The variables to set on another machine."""
    from clawq.transport.urls import CA_VARIABLE, SECURITY_VARIABLE

    # The path of a certificate in our own URLs is one of this machine.
    urls = [url.partition("?ssl_ca_certs")[0] for url in (servers.broker_url, servers.data_url)]
    variables = {"CLAWQ_BROKER_URL": urls[0], "CLAWQ_DATA_URL": urls[1]}
    if tcp is not None and tcp.tls is not None:
        variables[CA_VARIABLE] = str(tcp.tls.authority.absolute())
    elif tcp is not None and not tcp.local:
        variables[SECURITY_VARIABLE] = "password"
    return variables


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
    """Show where Redis is, whether both servers answer, and whether they are fit for clawq."""
    from clawq.errors import TransportError, UserError
    from clawq.state import resolve_urls
    from clawq.transport.client import connect
    from clawq.transport.health import health
    from clawq.transport.urls import redact

    urls = resolve_urls()
    if urls is None:
        raise UserError("no clawq Redis is known on this machine; start one with `clawq redis start`")
    unfit: TransportError | None = None
    for role, url in zip(("broker", "data"), urls, strict=True):
        click.echo(f"{role:<7}{redact(url)}")
        try:
            for label, text in health(connect(url), role):
                click.echo(f"  {label:<12}{text}")
        except TransportError as error:
            click.echo(f"  {'unusable':<12}{error}")
            unfit = unfit or error
    if unfit is not None:
        raise unfit


@redis.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--worker", "workers", multiple=True, metavar="NAME", help="A worker's user; may be given several times.")
@click.option("--seats", is_flag=True, help="Workers share the seats of runs that go by rounds (`sync`).")
@click.option("--broker-url", help="Where the broker is, if it is not `clawq redis start --acl` that will start it.")
@click.option("--data-url", help="Where the data server is; likewise.")
@click.option("--server-version", default="7.0", show_default=True, help="Of the oldest of the two servers.")
def acl(
    folder: Path,
    workers: tuple[str, ...],
    seats: bool,
    broker_url: str | None,
    data_url: str | None,
    server_version: str,
) -> None:
    """Make users with just the rights they need, in FOLDER: one for each worker, learner, watchdog, viewer, admin.

    Users that FOLDER has already keep their passwords. Servers that run take changes over by `ACL LOAD`.
    """
    from clawq.transport.acl import make_passwords, write_env, write_files

    version = tuple(int(part) for part in server_version.split(".") if part.isdecimal())
    if version < (7, 0):
        raise click.UsageError(
            f"--server-version {server_version}: rights like these need a server of version 7.0 or newer"
        )
    if (broker_url is None) != (data_url is None):
        raise click.UsageError("--broker-url and --data-url belong together")
    passwords = make_passwords(folder, workers)
    write_files(folder, passwords, seats, version)
    click.echo(f"users: {', '.join(passwords)}")
    click.echo(f"for the servers: {folder / 'broker.acl'}, {folder / 'data.acl'}; for one that is both: users.acl")
    if broker_url and data_url:
        write_env(folder, passwords, {"CLAWQ_BROKER_URL": broker_url, "CLAWQ_DATA_URL": data_url})
        click.echo(f"for the machines (secrets): {folder / 'NAME.env'}, to be sourced before clawq is used")
    else:
        click.echo(f"next: clawq redis start --bind ADDRESS --acl {folder}")


def _ended(pid: int, started: str) -> bool:
    import time

    from clawq.state import process_start

    deadline = time.monotonic() + _STOP_S
    while process_start(pid) == started:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
