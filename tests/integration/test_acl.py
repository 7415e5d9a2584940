"""The whole system under ACL users, each with just the rights it needs, over TLS; no password where none belongs."""

import os
import stat
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
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    """Two servers, over TLS where one has it; or one that is both."""
    tls, both = None, request.param == "one server"
    if not both and tls_server() is not None:
        authority = Authority(tmp_path, "our-ca")
        tls = Tls(*authority.certificate("server", "DNS:localhost"), authority.file)
    guarded = Guarded(tmp_path, "arm-1", "arm-2", tls=tls, both=both)
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
@pytest.mark.parametrize("guarded", ["two servers", "one server"], indirect=True)
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_pool_works_under_users_by_rounds_too_over_kills_and_to_its_end(
    tmp_path: Path, home: Clawq, eventually: Callable[..., None]
) -> None:
    pools = {"arm-1": "threads", "arm-2": "prefork", "arm-3": "solo"}
    guarded = Guarded(tmp_path, *pools, seats=True)
    registry, data = RunRegistry(guarded.admin["broker"]), guarded.admin["data"]
    logs = {"CLAWQ_LOG_DIR": str(tmp_path / "logs"), "CLAWQ_LOG_LEVEL": "DEBUG"}
    try:
        workers = {
            name: home.start("worker", "start", "--slots", "1", "--pool", pool, **guarded.env(name), **logs)
            for name, pool in pools.items()
        }

        def train(run: str, *overrides: str) -> Command:
            words = (POINT, f"folder={home.runs}", *QUICK, *overrides, "--run", run)
            return home.start("learner", "start", *words, **guarded.env("learner"), **logs)

        def sent(run: str) -> dict[str, int]:
            """Stream -> entries that it ever had."""
            if (record := registry.get(run)) is None:
                return {}
            streams = {slot.decode(): record.keys.stream(slot.decode()) for slot in data.hkeys(record.keys.slots)}
            return {
                slot: data.xinfo_stream(key)["entries-added"] if data.exists(key) else 0
                for slot, key in streams.items()
            }

        def all_send(run: str, names: set[str], before: dict[str, int]) -> bool:
            now = sent(run)
            return {slot[: len("arm-1-")] for slot in now} == names and all(
                count > before.get(slot, 0) for slot, count in now.items()
            )

        # Each pool's worker writes streams of its own, and goes on doing so when its main process was killed
        free, own = train("free", "budget={env_steps: 100000000}", "actors.lease_s=1"), {f"{name}-" for name in pools}
        eventually(lambda: all_send("free", own, {}), "all send", 300)
        for command in workers.values():
            next(p for p in command.tree() if "clawq.control.worker" in p.cmdline()).kill()
        before = {slot: count + 3 for slot, count in sent("free").items()}
        eventually(lambda: all_send("free", own, before), "all send again", 120)
        learner = guarded.env("learner")
        assert call(home, learner, "tune", "free", "budget.env_steps=2000").status == 0
        assert free.wait(300) == 0, free.output + home.logs("free")
        # By rounds, they take seats
        sync = ("sync.actors=3", "sync.quota_steps=24", "sync.fragment_steps=8", "environment.num_envs=4")
        rounds = train("rounds", *sync, "rate_limit.min_size_to_sample=200", "budget={env_steps: 5760}")
        seats = {"seat-000", "seat-001", "seat-002"}
        eventually(lambda: set(sent("rounds")) == seats or rounds.status is not None, "seats are taken", 300)
        assert rounds.wait(300) == 0, rounds.output + home.logs("rounds")
        assert home.report("rounds")["numbers"]["env_steps"] == 5760
        assert guarded.refusals() == []
        for name, command in workers.items():
            ended, _, left = command.stop()
            assert (ended, left) == (0, []), f"{name}: {command.output}"
        assert guarded.refusals() == []
        assert MARK not in "\n".join(command.output for command in home.started)
        allowed = {guarded.users / name for name in os.listdir(guarded.users)}
        telling = {file for file in tmp_path.rglob("*") if file.is_file() and MARK.encode() in file.read_bytes()}
        # What was killed could not take its registration away, by which a watchdog ends what it left; it is private.
        records = {file for file in telling if file.parts[-3] == "processes"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in records} <= {0o600}
        assert telling - records <= allowed
    finally:
        home.close()
        guarded.close()


def test_rounds_need_users_that_may_take_seats(tmp_path: Path, eventually: Callable[..., None]) -> None:
    guarded = Guarded(tmp_path, "arm-1", seats=True)
    try:
        worker = guarded.client("arm-1")
        key = "clawq:{" + "0" * 32 + "}:s:seat-0"
        worker.xadd(key, {"f": b"x"})
        assert guarded.refusals() == []
    finally:
        guarded.close()
