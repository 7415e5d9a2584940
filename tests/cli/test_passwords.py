"""No command shows a password, whatever becomes of it: the server is away, or refuses the password."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from guarded import MARK

from clawq.cli.main import run
from clawq.procfs import Identity
from clawq.registry import Record, Registry
from clawq.transport.listening import Tcp
from clawq.transport.server import EmbeddedRedis

POINT = str(Path(__file__).parents[2] / "configs" / "point.yaml")
COMMANDS = (
    "status", "status r --json", "tune r staleness.hard=3", "learner stop r", "reader ls r", "reader drop r keeper",
    "redis status", "watchdog status", "worker dead ls", "worker dead show 1-1", "worker dead retry 1-1",
    "worker dead drop 1-1", "log ls r", "log show r s-0 5-1", "log dlq ls r", "log dlq show r s-0 5-1", "log ledger r",
    "log quarantine r --list", "log export r --format hdf5 --out x --follow", "log export r --format hdf5 --out x",
    "replay r", "bisect r", "plugins list", f"config check {POINT}",
)  # fmt: skip


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that wants another password."""
    servers = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), 64, Tcp(password="another-one-" * 3))
    host = servers.data_url.rpartition("@")[2].partition("?")[0]
    yield f"redis://arm-1:{MARK}@{host}"
    servers.stop()


@pytest.mark.parametrize("away", [True, False], ids=["away", "refused"])
def test_no_command_shows_the_password_of_its_servers(
    away: bool, guarded_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"redis://arm-1:{MARK}@127.0.0.1:1/0" if away else guarded_url
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    for variable in ("CLAWQ_BROKER_URL", "CLAWQ_DATA_URL"):
        monkeypatch.setenv(variable, url)
    for words in COMMANDS:
        run(words.split())
        told = "".join(capfd.readouterr())
        assert MARK not in told, words
        assert "bug in clawq" not in told, (words, told[-2000:])
    telling = [file for file in tmp_path.rglob("*") if file.is_file() and MARK.encode() in file.read_bytes()]
    assert telling == []


def test_what_the_watchdog_knows_of_a_process_is_kept_private_and_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    me, url, registry = Identity.of(os.getpid()), f"redis://arm-1:{MARK}@127.0.0.1:1/0", Registry()
    assert me is not None
    registry.add(Record("ab" * 16, me, "actor", "arm-1-w1-0", urls=(url, url), inherited=False))
    for words in (["watchdog", "status"], ["watchdog", "explain", str(os.getpid())]):
        assert run(words) == 0
        told = "".join(capfd.readouterr())
        assert "arm-1-w1-0" in told
        assert MARK not in told
    holding = [file for file in tmp_path.rglob("*") if file.is_file() and MARK.encode() in file.read_bytes()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in holding] == [0o600]
