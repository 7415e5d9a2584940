"""Where embedded Redis servers listen, and who may come in: socket files, or TCP with a password or with ACL users.

Nobody but this user reaches a socket file, so it needs no password. TCP is for other machines: on the loopback address
unless another one is named, and there never without a password. Secrets go to the server by stdin or in a file, never
by argv, which every user of the host can read.
"""

import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from clawq.errors import UserError

LOOPBACK = "127.0.0.1"
#: Bind addresses that mean all interfaces.
_ALL = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a server's TLS, in PEM form: its certificate, its key, and the certificate of who signed it."""

    certificate: Path
    key: Path
    authority: Path

    def __post_init__(self) -> None:
        for file in (self.certificate, self.key, self.authority):
            if not file.is_file() or not os.access(file, os.R_OK):
                raise UserError(f"{file} cannot be read; TLS needs its certificate, its key, and who signed it, as PEM")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the server. Clients need no certificate of their own: they have passwords."""
        files = {"cert": self.certificate, "key": self.key, "ca-cert": self.authority}
        return (
            *(word for name, file in files.items() for word in (f"--tls-{name}-file", str(file.absolute()))),
            *("--tls-auth-clients", "no"),
        )


@dataclass(frozen=True, slots=True)
class Tcp:
    """How embedded servers listen on TCP.

    Attributes:
        bind: address to listen on.
        port: of the broker; the data server's is the next one. 0 = two that are free.
        name: under which other machines know this one; "" = its host name, or the address itself.
        password: of the user that everybody is; "" = none, on the loopback address only.
        tls: None = not encrypted.
        users: folder with `broker.acl` and `data.acl`, which then say who may come in; None = everybody by password.
        admin: (user, password) of these who may do everything.
    """

    bind: str = LOOPBACK
    port: int = 0
    name: str = ""
    password: str = ""
    tls: Tls | None = None
    users: Path | None = None
    admin: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        if not (self.local or self.password or self.users):
            raise UserError(
                f"a Redis on {self.bind} without a password is open to everybody who reaches this machine; it would be "
                f"used to run programs here. Leave the password in, or bind to {LOOPBACK}"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        return self.bind in (LOOPBACK, "::1", "localhost")

    @property
    def host(self) -> str:
        """The name for URLs."""
        if self.name or self.local:
            return self.name or LOOPBACK
        return _host_name() if self.bind in _ALL else self.bind


@dataclass(frozen=True, slots=True)
class Address:
    """Where one server listens.

    Attributes:
        arguments: of the server, without secrets.
        url: for clients; with ACL users, as the one who may do everything.
        secret: configuration line for the server's stdin, "" if there is none.
    """

    arguments: tuple[str, ...]
    url: str
    secret: str = ""

    @classmethod
    def socket(cls, path: Path) -> "Address":
        """On a socket file, of this user alone."""
        return cls(("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"), f"unix://{path}?db=0")

    @classmethod
    def tcp(cls, tcp: Tcp, role: str) -> "Address":
        """On TCP, as the `broker` or the `data` server.

        Raises:
            UserError: the port is taken, or the address is none of this machine.
        """
        port = _port(tcp.bind, tcp.port + (role == "data") if tcp.port else 0)
        ports = ("--port", str(port)) if tcp.tls is None else ("--port", "0", "--tls-port", str(port))
        # Redis' own protection is for servers without password; it would refuse what is meant to come in.
        arguments = [*ports, "--bind", tcp.bind, "--protected-mode", "yes" if tcp.local else "no"]
        query = ""
        if tcp.tls is not None:
            arguments += tcp.tls.arguments
            query = f"?ssl_ca_certs={quote(str(tcp.tls.authority.absolute()), safe='/')}"
        user, password = tcp.admin if tcp.users else ("", tcp.password)
        if tcp.users is not None:
            arguments += ["--aclfile", str((tcp.users / f"{role}.acl").absolute())]
        login = f"{user}:{quote(password, safe='')}@" if password else ""
        scheme = "redis" if tcp.tls is None else "rediss"
        secret = f'requirepass "{password}"' if password and tcp.users is None else ""
        return cls(tuple(arguments), f"{scheme}://{login}{tcp.host}:{port}/0{query}", secret)


def password_of(file: Path) -> str:
    """The password in a file's only line; a file that is not there is made, with a random one.

    Raises:
        UserError: others can read it, or it holds no password.
    """
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_urlsafe(24) + "\n")
    password = read_private(file).strip()
    if not password or any(char.isspace() or char in "\"'\\" for char in password):
        raise UserError(f"{file} must hold one password, without spaces, quotes and backslashes; it holds none such")
    return password


def read_private(file: Path) -> str:
    """The text of a file that holds a secret.

    Raises:
        UserError: it cannot be read, or others can read it.
    """
    try:
        text, mode = file.read_text(encoding="utf-8"), file.stat().st_mode
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"{file} holds a secret, and others can read it; `chmod 600 {file}`")
    return text


def _port(bind: str, wanted: int) -> int:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        with socket.create_server(("" if bind in _ALL else bind, wanted), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UserError(f"Redis cannot listen on {bind}, port {wanted or 'any'}: {error.strerror or error}") from None


def _host_name() -> str:
    """A name of this host that other hosts may know; localhost if it does not even resolve here."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"
    return name


__all__ = ["LOOPBACK", "Address", "Tcp", "Tls", "password_of", "read_private"]
