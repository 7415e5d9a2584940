"""A learner's session: its coordinator and its entry are looked after, its name is its own, the past is past."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clawq.config import RunConfig
from clawq.errors import UserError
from clawq.programs.run import Run, create_run
from clawq.programs.session import Session, open_session
from clawq.spawning.spawner import Spawner
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.control import Events, RunRegistry, delete_run
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
        assert first.after_event == "0-0"
        told = Events(first.data, first.keys).append("stop_wanted")
    with session(redis_servers, run) as second:
        assert second.after_event == told
        assert Events(second.data, second.keys).read(second.after_event) == []


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
