"""ACL users of the two Redis servers, as files: who they are, their passwords, and what each machine is given.

A folder holds

    passwords                  user and password, one pair a line; made, or added to, with random ones; may be edited
    broker.acl, data.acl       for the servers (`aclfile`), with digests instead of passwords
    users.acl                  both in one, for a lab in which one server is broker and data server
    <user>.env                 for the machine of that user: the two URLs, to be sourced by a shell

all readable by their owner alone. What users may do is in clawq.transport.rights. `default`, who is everybody that does
not say who he is, is off.
"""

import hashlib
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawq.errors import UserError
from clawq.transport.listening import read_private
from clawq.transport.rights import ROLES, Grant, broker_rights, data_rights
from clawq.transport.urls import with_user

#: Servers that know and are told the name of a client's library; older ones refuse a rule about it.
_SETINFO_VERSION = (7, 2)
#: Servers with key rights for reading and writing apart, and with selectors.
ACL_VERSION = (7, 0)
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
PASSWORDS = "passwords"


def check_workers(names: Sequence[str]) -> None:
    """UserError unless these can be names of workers: each one's slots must be its own."""
    for name in names:
        if not _WORKER.fullmatch(name) or name in (*ROLES, "default", "seat"):
            raise UserError(
                f"a worker cannot be called {name!r}: 1 to 32 letters, digits and _ . - and none of "
                f"{', '.join((*ROLES, 'default', 'seat'))}"
            )
        for other in names:
            if other.startswith(f"{name}-"):
                raise UserError(
                    f"workers {name!r} and {other!r} cannot both be: slots of {other!r} would be slots of {name!r} too"
                )


def make_passwords(folder: Path, workers: Sequence[str]) -> dict[str, str]:
    """User -> password, of all that the folder knows and of these workers; missing ones are made and kept.

    Raises:
        UserError: the file cannot be used, or a worker cannot be called so.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / PASSWORDS
    known = read_passwords(folder) if file.exists() else {}
    names = dict.fromkeys([*ROLES, *known, *workers])
    check_workers([name for name in names if name not in ROLES])
    passwords = {name: known.get(name) or secrets.token_urlsafe(24) for name in names}
    _write_private(file, "".join(f"{name} {password}\n" for name, password in passwords.items()))
    return passwords


def read_passwords(folder: Path) -> dict[str, str]:
    """User -> password.

    Raises:
        UserError: the file cannot be used.
    """
    file = folder / PASSWORDS
    passwords = {}
    for number, line in enumerate(read_private(file).splitlines(), 1):
        words = line.split()
        if len(words) not in (0, 2):
            raise UserError(f"{file}, line {number}: it must be a user, a space and a password without spaces")
        if words:
            passwords[words[0]] = words[1]
    return passwords


def write_files(folder: Path, passwords: Mapping[str, str], seats: bool, version: tuple[int, ...]) -> None:
    """Write `broker.acl`, `data.acl` and `users.acl` for servers of that version."""
    for role, text in acl_files(passwords, seats, version).items():
        _write_private(folder / f"{role}.acl", text)


def write_env(folder: Path, passwords: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Write `<user>.env` of every user.

    Args:
        folder: where to.
        passwords: user -> password.
        variables: to be set; whom the URLs among them name does not matter.
    """
    for user, password in passwords.items():
        own = {name: with_user(variables[name], user, password) for name in ("CLAWQ_BROKER_URL", "CLAWQ_DATA_URL")}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in {**variables, **own}.items()]
        _write_private(folder / f"{user}.env", "".join(lines))


def acl_files(passwords: Mapping[str, str], seats: bool, version: tuple[int, ...]) -> dict[str, str]:
    """`broker`, `data`, and `users` for one server that is both -> text of the ACL file."""
    texts = {}
    for name in ("broker", "data", "users"):
        lines = ["user default off resetchannels -@all"]
        for user, password in passwords.items():
            broker, data = broker_rights(user), data_rights(user, seats)
            grants = {"broker": broker, "data": data, "users": [*broker, *data]}[name]
            lines.append(_line(user, password, grants, version))
        texts[name] = "\n".join(lines) + "\n"
    return texts


def _line(user: str, password: str, grants: Sequence[Grant], version: tuple[int, ...]) -> str:
    digest = hashlib.sha256(password.encode()).hexdigest()
    begin = f"user {user} on #{digest}"
    if user == "admin":
        return f"{begin} ~* &* +@all"
    first, *more = grants
    setinfo = " +client|setinfo" if version >= _SETINFO_VERSION else ""
    selectors = "".join(f" ({_rules(grant)})" for grant in more)
    return f"{begin} resetkeys resetchannels -@all {_rules(first)}{setinfo}{selectors}"


def _rules(grant: Grant) -> str:
    both = [key for key in grant.reads if key in grant.writes]
    keys = [f"~{key}" for key in both]
    keys += [f"%R~{key}" for key in grant.reads if key not in both]
    keys += [f"%W~{key}" for key in grant.writes if key not in both]
    return " ".join([*keys, *(f"+{command}" for command in grant.commands)])


def _write_private(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    new.replace(file)


__all__ = [
    "ACL_VERSION",
    "PASSWORDS",
    "acl_files",
    "check_workers",
    "make_passwords",
    "read_passwords",
    "write_env",
    "write_files",
]
