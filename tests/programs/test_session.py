"""A learner's session: its coordinator and its entry are looked after, its name is its own, the past is past."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clawq.config import RunConfig
from clawq.errors import ClaimLost, UserError
from clawq.programs import session as session_module
from clawq.programs.run import Run, create_run
from clawq.programs.session import Session, open_session
from clawq.spawning.spawner import Spawner
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.claims import Claim, holder_of
from clawq.transport.client import connect
from clawq.transport.control import ControlRecord, Events, Orders, RunRegistry, delete_run
from clawq.transport.server import EmbeddedRedis

Eventually = Callable[..., None]


def make_run(folder: Path, name: str = "r1") -> Run:
    raw = {"name": "test", "folder": str(folder), "environment": {"name": "point"}}
    return create_run(RunConfig.model_validate(raw), name, point_spec(PointOptions()))


@contextmanager
def session(servers: EmbeddedRedis, run: Run) -> Iterator[Session]:
    with open_session(run, servers.broker_url, servers.data_url, Spawner()) as opened:
        yield opened
        delete_run(opened.data, opened.keys)


def test_a_killed_coordinator_is_started_again_and_a_lost_entry_written_again(
    redis_servers: EmbeddedRedis, tmp_path: Path, eventually: Eventually
) -> None:
    with session(redis_servers, make_run(tmp_path)) as opened:
        keeper = opened.keeper
        assert keeper is not None
        first = keeper.child
        assert first is not None
        # When the coordinator is killed, and the broker loses the run
        first.kill_session()
        RunRegistry(opened.broker).remove("r1")
        # Then there is another one, and the run is known again
        eventually(lambda: keeper.restarts == 1, "another coordinator", 10)
        assert keeper.child is not None
        assert keeper.child.pid != first.pid
        eventually(lambda: RunRegistry(opened.broker).get("r1") is not None, "the run is registered again", 10)
        second = keeper.child
    # And both are gone with the session
    assert second.exited()


def test_what_an_earlier_session_was_told_is_no_word_to_this_one(redis_servers: EmbeddedRedis, tmp_path: Path) -> None:
    run = make_run(tmp_path, "r2")
    with open_session(run, redis_servers.broker_url, redis_servers.data_url, Spawner()) as first:
        assert first.after == ("0-0", "0-0")
        happened = Events(first.data, first.keys).append("lease")
        told = Orders(first.data, first.keys).append("stop_wanted")
    with session(redis_servers, run) as second:
        assert second.after == (happened, told)
        assert Orders(second.data, second.keys).read(told) == []


def test_a_name_that_another_living_run_has_is_refused(redis_servers: EmbeddedRedis, tmp_path: Path) -> None:
    other = make_run(tmp_path / "elsewhere", "r3")
    with session(redis_servers, make_run(tmp_path, "r3")) as opened:
        with (
            pytest.raises(UserError, match=r"the name r3 is taken .*--run NAME"),
            open_session(other, redis_servers.broker_url, redis_servers.data_url, Spawner()),
        ):
            pass
        record = RunRegistry(opened.broker).get("r3")
        assert record is not None
        assert record.tag == opened.run.tag


@pytest.mark.parametrize("state", ["failed", "done"])
def test_a_learner_that_lost_its_run_unawares_leaves_it_to_the_one_that_has_it(
    redis_servers: EmbeddedRedis, tmp_path: Path, state: str
) -> None:
    run = make_run(tmp_path, f"r4-{state}")
    with ExitStack() as late:
        old = late.enter_context(open_session(run, redis_servers.broker_url, redis_servers.data_url, Spawner()))
        # Given that its claim ran out while it was stopped, and another learner goes on with the run
        old.data.delete(old.claim.key)
        with session(redis_servers, run) as new:
            ControlRecord(new.data, new.keys, new.claim).write(stop=False, window_bytes=1000, config_epoch=1)
            told = Events(new.data, new.keys).append("lease")
            # When the old one ends, without having noticed anything
            old.state = state
            late.close()
            # Then the run is as it was
            control, record = ControlRecord(new.data, new.keys).read(), RunRegistry(new.broker).get(run.id)
            assert control is not None
            assert not control.stop
            assert record is not None
            assert record.same_session(new.record)
            assert Events(new.data, new.keys).newest_id() == told
            assert new.claim.is_held()
    # And its new learner still can end it.
    assert RunRegistry(connect(redis_servers.broker_url)).get(run.id) is None


def test_a_session_whose_claim_lapsed_and_that_nobody_followed_ends_the_run(
    redis_servers: EmbeddedRedis, tmp_path: Path
) -> None:
    run = make_run(tmp_path, "r5")
    data = connect(redis_servers.data_url)
    with open_session(run, redis_servers.broker_url, redis_servers.data_url, Spawner()) as opened:
        keys = opened.keys
        ControlRecord(data, keys).write(stop=False, window_bytes=1000, config_epoch=1)
        Events(data, keys).append("lease")
        opened.state = "done"
        data.delete(opened.claim.key)
    control = ControlRecord(data, keys).read()
    assert control is not None
    assert control.stop
    assert RunRegistry(connect(redis_servers.broker_url)).get("r5") is None
    assert Events(data, keys).newest_id() == "0-0"
    assert holder_of(data, keys.claim("learner")) is None
    delete_run(data, keys)


def test_a_learner_that_lost_its_run_looks_after_nothing(
    redis_servers: EmbeddedRedis, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "r6")
    with open_session(run, redis_servers.broker_url, redis_servers.data_url, Spawner()) as old:
        assert old.keeper is not None
        assert old.keeper.child is not None
        registry, data, keys = RunRegistry(connect(redis_servers.broker_url)), connect(redis_servers.data_url), old.keys
        data.delete(old.claim.key)
        Claim.take(data, old.claim.key, "another learner", 60.0)
        looks: list[bool] = []
        is_held = old.claim.is_held

        def look() -> bool:
            looks.append(is_held())
            return looks[-1]

        monkeypatch.setattr(old.claim, "is_held", look)
        # When the broker forgets the run and the old coordinator ends
        registry.remove("r6")
        old.keeper.child.kill_session()
        # Then its keeper looks, and does nothing.
        eventually(lambda: len(looks) >= 3, "three looks", 10)
        assert not any(looks)
        assert old.keeper.restarts == 0
        assert registry.get("r6") is None
    assert holder_of(data, keys.claim("learner")) == "another learner"
    delete_run(data, keys)


def test_the_entry_of_a_learner_that_lost_the_run_is_replaced(
    redis_servers: EmbeddedRedis, tmp_path: Path, eventually: Eventually
) -> None:
    with session(redis_servers, make_run(tmp_path, "r7")) as opened:
        registry = RunRegistry(opened.broker)
        stale = replace(opened.record, created_ms=1)
        registry.add(stale)

        def ours() -> bool:
            entry = registry.get("r7")
            return entry is not None and entry.same_session(opened.record)

        eventually(ours, "the run's own entry", 10)
        assert not registry.withdraw(stale)
        assert ours()


def test_the_claim_of_a_learner_that_loads_for_long_is_kept_and_handed_over(
    redis_servers: EmbeddedRedis, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "CLAIM_TTL_S", 0.6)
    with session(redis_servers, make_run(tmp_path, "r8")) as opened:
        value, ends = opened.data.get(opened.claim.key), time.monotonic() + 2.0
        # While it loads, for longer than its claim lasts, it is the same claim
        while time.monotonic() < ends:
            assert opened.data.get(opened.claim.key) == value
            assert opened.data.pttl(opened.claim.key) <= 600
        # And who takes over renews it, or loses it
        opened.take_over_claim()
        eventually(lambda: opened.data.get(opened.claim.key) is None, "nobody else renews it", 5.0)
        Claim.take(opened.data, opened.claim.key, "another learner", 60.0)
        with pytest.raises(ClaimLost, match="another learner"):
            opened.take_over_claim()
