"""A small cluster with ACL users: its servers, and the environment of each user's machine."""

import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tls import start_with_tls

from clawq.transport.acl import make_passwords, read_passwords, write_env, write_files
from clawq.transport.client import connect
from clawq.transport.listening import Tcp, Tls
from clawq.transport.server import EmbeddedRedis, find_server

#: Stands in every password, so that it can be looked for.
MARK = "S3cretMark"


class Guarded:
    """Servers that let nobody in but the users of a folder.

    Attributes:
        users: the folder.
        servers: started with it.
        admin: clients of broker and data server, which may do everything.

    With `both` one server is broker and data server.
    """

    def __init__(
        self, folder: Path, *workers: str, seats: bool = False, tls: Tls | None = None, both: bool = False
    ) -> None:
        self.users = folder / "users"
        self.users.mkdir(mode=0o700, parents=True)
        names = ("learner", "watchdog", "viewer", "admin", *workers)
        file = self.users / "passwords"
        file.write_text("".join(f"{name} {MARK}-{name}\n" for name in names))
        file.chmod(0o600)
        passwords = make_passwords(self.users, workers)
        # Rights for old servers are understood by all, so it is either these or those of the one that is used.
        write_files(self.users, passwords, seats, (7, 0) if tls else find_server().version)
        if both:
            for name in ("broker.acl", "data.acl"):
                shutil.copyfile(self.users / "users.acl", self.users / name)
        tcp = Tcp(name="localhost", users=self.users, admin=("admin", passwords["admin"]), tls=tls)
        start = start_with_tls if tls else partial(EmbeddedRedis.start, data_memory_mb=64)
        self.servers = start(folder / "guarded", tcp=tcp)
        urls = (self.servers.broker_url, self.servers.broker_url if both else self.servers.data_url)
        broker_url, data_url = (url.partition("?")[0] for url in urls)
        variables = {"CLAWQ_BROKER_URL": broker_url, "CLAWQ_DATA_URL": data_url}
        authority = {"CLAWQ_REDIS_CA": str(tls.authority)} if tls else {}
        write_env(self.users, read_passwords(self.users), variables | authority)
        self.admin: dict[str, Any] = dict(zip(("broker", "data"), map(connect, urls), strict=True))

    def env(self, user: str) -> dict[str, str]:
        """What the file of a user's machine sets."""
        lines = (self.users / f"{user}.env").read_text().splitlines()
        pairs = (shlex.split(line.removeprefix("export "))[0].partition("=") for line in lines)
        return {name: value for name, _, value in pairs}

    def client(self, user: str, server: str = "data") -> Any:
        """A client of a server, as that user."""
        return connect(self.env(user)["CLAWQ_DATA_URL" if server == "data" else "CLAWQ_BROKER_URL"])

    def refusals(self) -> list[str]:
        """What the servers have refused, and to whom."""
        return [
            f"{server}: {entry['username']} {entry['reason']} {entry['object']}"
            for server, client in self.admin.items()
            for entry in client.acl_log()
        ]

    def close(self) -> None:
        """End the servers."""
        for client in self.admin.values():
            client.close()
        self.servers.stop()
