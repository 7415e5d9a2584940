"""Certificates for tests, made with openssl, and a Redis server that speaks TLS, where there is one.

ops/setup-tls brings Debian's server, which has TLS; the one that comes with clawq has none.
"""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from clawq.transport.listening import Tcp
from clawq.transport.server import EmbeddedRedis, find_server, speaks_tls

#: Where ops/setup-tls puts one.
SET_UP = Path(__file__).parents[2] / ".venv" / "redis-tls" / "redis-server"


@cache
def tls_server() -> Path | None:
    """A server binary with TLS, None if there is none on this machine (or no openssl)."""
    named = [find_server().path, SET_UP, *map(Path, filter(None, [shutil.which("redis-server")]))]
    found = [path for path in named if path.exists() and speaks_tls(path)]
    return found[0] if found and shutil.which("openssl") else None


def start_with_tls(folder: Path, tcp: Tcp) -> EmbeddedRedis:
    """Servers of the binary that has TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLAWQ_REDIS_SERVER", str(tls_server()))
        return EmbeddedRedis.start(folder, 64, tcp)


class Authority:
    """Signs certificates.

    Attributes:
        file: its own certificate.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.file, self._key, self._folder = folder / f"{name}.pem", folder / f"{name}.key", folder
        _openssl("req", "-x509", "-days", "30", *_key_to(self._key), "-subj", f"/CN={name}", "-out", str(self.file))

    def certificate(self, name: str, hosts: str, days: int = 30) -> tuple[Path, Path]:
        """(certificate, key) for hosts, as `DNS:localhost,IP:127.0.0.1`; with negative days it has expired."""
        made, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\n")
        _openssl("req", *_key_to(key), "-subj", f"/CN={name}", "-out", str(request))
        signed_by = ("-CA", str(self.file), "-CAkey", str(self._key), "-CAcreateserial", "-extfile", str(extensions))
        _openssl("x509", "-req", "-in", str(request), *signed_by, "-days", str(days), "-out", str(made))
        return made, key


def _key_to(key: Path) -> tuple[str, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
