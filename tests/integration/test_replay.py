"""`clawq replay` and `clawq bisect` of a run that was really made: nothing but its folder is left, with the archive."""

import pytest
from clawq_process import Clawq


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_replayed_bit_for_bit_from_its_archive_otherwise_too_and_cleared_by_bisect(clawq: Clawq) -> None:
    up = clawq.up(
        "point.yaml", "p1", "budget={env_steps: 3000}", "archive.enabled=true", "record.animation=false",
        "evaluation.interval_s=null", "evaluation.final_episodes=2", "rate_limit.min_size_to_sample=500",
        "learner.device=cpu", "learner.checkpoint_interval_s=2",
    )  # fmt: skip
    assert up.wait(250) == 0, up.output + clawq.logs("p1")
    folder = str(clawq.runs / "p1")
    updates = int(clawq.report("p1")["numbers"]["updates"])
    assert updates > 20
    # Everything is accounted for, and that is read from the folder alone
    ledger = clawq.call("log", "ledger", folder, timeout_s=300)
    assert ledger.status == 0, ledger.output
    assert "balances" in ledger.output
    # The same weights come out again, without simulator, worker or Redis
    again = clawq.call("replay", folder, "--run", "p1-again", timeout_s=300)
    assert again.status == 0, again.output
    assert f"identical up to update {updates}" in again.output
    assert "final weights: identical, bit for bit" in again.output
    assert (clawq.runs / "p1-again" / "weights" / "final.safetensors").read_bytes()
    # With another learning rate, of a part of the log
    words = ("algorithm.options.lr_actor=0.0001", "--from", "fragment:3", "--seed", "5", "--run", "p1-other")
    other = clawq.call("replay", folder, *words, timeout_s=300)
    assert other.status == 0, other.output
    assert clawq.report("p1-other")["mode"] == "free"
    assert clawq.report("p1-other")["updates"] > 20
    # And bisect finds nothing wrong
    cleared = clawq.call("bisect", folder, timeout_s=300)
    assert cleared.status == 0, cleared.output
    assert f"nothing goes wrong: {updates} updates" in cleared.output
