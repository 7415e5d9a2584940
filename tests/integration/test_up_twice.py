"""`clawq up` started twice on one machine: two runs beside one another, and never two on one folder."""

from collections.abc import Callable

import pytest
from clawq_process import Clawq, Command
from processes import outliving

Eventually = Callable[..., None]
QUICK = ("evaluation.interval_s=null", "evaluation.final_episodes=2", "record.animation=false", "metrics=[jsonl]")
SHORT = (*QUICK, "budget={env_steps: 3000}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_runs_beside_one_another_both_end_well_and_are_both_to_be_seen(
    clawq: Clawq, eventually: Eventually
) -> None:
    first = clawq.up("point.yaml", "one", *QUICK, "budget={}")
    eventually(lambda: any(line.get("updates", 0) > 20 for line in clawq.metrics("one")), "updates of the first", 90)
    second = clawq.up("point.yaml", "two", *QUICK, "budget={}")
    eventually(lambda: any(line.get("updates", 0) > 20 for line in clawq.metrics("two")), "updates of the second", 90)
    # The first is found by itself, the second in the way that it tells
    assert clawq.status("one")["run_id"] == "one"
    assert clawq.status("two") == {}
    [told] = [line for line in second.output.splitlines() if "stay private to it" in line]
    assignments = [word.replace("'", "").partition("=") for word in told.split() if word.startswith("CLAWQ_")]
    env = {name: value for name, _, value in assignments}
    looked = clawq.start("status", **env)
    assert looked.wait(30) == 0
    assert "two  running" in looked.output
    # Each goes on without the other, and whose servers are announced is not touched by the other's end
    trees = [*first.tree(), *second.tree()]
    assert second.stop()[0] == 0, second.output
    assert clawq.status("one")["run_id"] == "one"
    before = clawq.metrics("one")[-1]["env_steps"]
    eventually(lambda: clawq.metrics("one")[-1].get("env_steps", 0) > before + 500, "the first goes on", 60)
    assert first.stop()[0] == 0, first.output
    assert not outliving(trees, 3.0)
    for run in ("one", "two"):
        numbers = clawq.report(run)["numbers"]
        assert numbers["gap_fragments"] == numbers["duplicates"] == 0
    assert not list((clawq.folder / "state").glob("redis*.json"))
    assert not list((clawq.folder / "state" / "redis").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_two_that_begin_at_once_under_one_name_one_is_refused_and_the_other_is_not_disturbed(clawq: Clawq) -> None:
    def settled(commands: list[Command]) -> list[tuple[int, str]]:
        return sorted((command.wait(120), command.output) for command in commands)

    # In one folder
    (status, won), (refused, why) = settled([clawq.up("point.yaml", "same", *SHORT) for _ in range(2)])
    assert (status, refused) == (0, 2), won + why
    assert "in use by another `clawq up`" in why
    assert clawq.report("same")["numbers"]["env_steps"] >= 3000
    # In two folders, on one machine's Redis folder
    both = [clawq.up("point.yaml", "same", *SHORT, f"folder={clawq.folder / name}") for name in ("here", "there")]
    (status, won), (refused, why) = settled(both)
    assert (status, refused) == (0, 2), won + why
    assert "another name with --run" in why
    # The name is free again, in another folder, when the run is over; and a folder that holds a run is not taken
    again = clawq.up("point.yaml", "same", *SHORT)
    assert again.wait(120) == 2
    assert "exists already" in again.output
    for command in clawq.started:
        assert "Traceback" not in command.output
