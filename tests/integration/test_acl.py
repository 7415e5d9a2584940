"""The whole system under ACL users, each with just the rights it needs, over TLS; no password where none belongs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clawq_process import ROOT, Clawq, Command
from guarded import MARK, Guarded
from tls import Authority, tls_server

from clawq.transport.control import RunRegistry
from clawq.transport.listening import Tls

POINT = str(ROOT / "configs" / "point.yaml")
QUICK = (
    "record.animation=false",
    "evaluation.interval_s=2",
    "evaluation.final_episodes=2",
    "budget.target_success=null",
)
EVERYTHING = ("archive.enabled=true", "learner.checkpoint_interval_s=2", "actors.lease_s=2")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """Over TLS where a server has it."""
    tls = None
    if tls_server() is not None:
        authority = Authority(tmp_path, "our-ca")
        tls = Tls(*authority.certificate("server", "DNS:localhost"), authority.file)
    guarded = Guarded(tmp_path, "arm-1", "arm-2", tls=tls)
    yield guarded
    guarded.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Clawq]:
    home = Clawq(tmp_path)
    yield home
    home.close()


def started_by(home: Clawq) -> list[psutil.Process]:
    return [process for command in home.started for process in command.tree()]


def call(home: Clawq, env: dict[str, str], *words: str) -> Command:
    """Run `clawq WORDS` as a user to its end."""
    command = home.start(*words, **env)
    command.wait(120)
    return command


def command_lines(processes: list[psutil.Process]) -> str:
    lines = []
    for process in processes:
        try:
            lines.append(" ".join([process.name(), *process.cmdline()]))
        except psutil.Error:
            continue
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_system_runs_under_users_and_tells_nobody_their_passwords(
    guarded: Guarded, home: Clawq, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    key = tmp_path / "key"
    key.write_text("a signing key, " + "x" * 40)
    key.chmod(0o600)
    signed = {"CLAWQ_SIGNING_KEY_FILE": str(key), "CLAWQ_LOG_DIR": str(tmp_path / "logs"), "CLAWQ_LOG_LEVEL": "DEBUG"}
    learner, viewer = {**guarded.env("learner"), **signed}, guarded.env("viewer")
    words = (POINT, f"folder={home.runs}", *QUICK, *EVERYTHING, "budget={env_steps: 100000000}", "--run", "guarded")
    trained = home.start("learner", "start", *words, **learner)
    for name in ("arm-1", "arm-2"):
        home.start("worker", "start", "--slots", "1", "--log-level", "DEBUG", **guarded.env(name), **signed)
    registry = RunRegistry(guarded.admin["broker"])
    eventually(lambda: registry.get("guarded") is not None, "the run is known", 300)
    run = registry.get("guarded")
    assert run is not None

    def writers() -> set[str]:
        return {slot.decode()[:6] for slot in guarded.admin["data"].hkeys(run.keys.slots)}

    eventually(lambda: writers() == {"arm-1-", "arm-2-"}, "both workers write streams of their own", 300)
    eventually(lambda: any(line.get("updates") for line in home.metrics("guarded")), "the learner learns", 600)
    seen = command_lines(started_by(home))
    assert "clawq.programs.actor" in seen
    status = call(home, viewer, "status", "guarded")
    assert status.status == 0, status.output
    assert "arm-1" in status.output
    assert call(home, viewer, "log", "ls", "guarded").status == 0
    assert call(home, viewer, "reader", "ls", "guarded").status == 0
    tuned = call(home, learner, "tune", "guarded", "staleness.hard=1000")
    assert (tuned.status, "1000" in tuned.output) == (0, True), tuned.output
    assert guarded.refusals() == []
    # Who may only look cannot change anything, and is told so in a line.
    for order in (("tune", "guarded", "staleness.hard=10"), ("learner", "stop", "guarded")):
        told = call(home, viewer, *order)
        assert told.status == 3
        assert "refuses us" in told.output
        assert "Traceback" not in told.output
    assert {line.split()[2] for line in guarded.refusals()} == {"command"}
    guarded.admin["data"].acl_log_reset()
    # It may end now: the last evaluation, and the run's keys taken away.
    assert call(home, learner, "tune", "guarded", "budget.env_steps=2000").status == 0
    assert trained.wait(300) == 0, trained.output + home.logs("guarded")
    for command in home.started[1:3]:
        status_code, _, left = command.stop()
        assert (status_code, left) == (0, []), command.output
    assert guarded.refusals() == []
    report = home.report("guarded")
    assert (report["numbers"]["env_steps"] >= 2000, report["incomplete"]) == (True, False)
    assert guarded.admin["data"].keys("clawq:*:s:*") == []
    outputs = "\n".join(command.output for command in home.started)
    assert MARK not in seen + outputs
    allowed = {guarded.users / name for name in os.listdir(guarded.users)}
    telling = [file for file in tmp_path.rglob("*") if file.is_file() and MARK.encode() in file.read_bytes()]
    # Environment variables of our own processes hold them, and the files that were made for that.
    assert set(telling) <= allowed


def test_rounds_need_users_that_may_take_seats(tmp_path: Path, eventually: Callable[..., None]) -> None:
    guarded = Guarded(tmp_path, "arm-1", seats=True)
    try:
        worker = guarded.client("arm-1")
        key = "clawq:{" + "0" * 32 + "}:s:seat-0"
        worker.xadd(key, {"f": b"x"})
        assert guarded.refusals() == []
    finally:
        guarded.close()
