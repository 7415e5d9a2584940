"""A recorded run is learned from again: to the last bit, otherwise, in part; and what cannot be is told."""

import json
import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from desk import ENVS, STEPS
from recorded import Recorded
from safetensors.torch import load_file, save_file
from waiting import Until

from clawq.cli.replay import lines
from clawq.config_file import load_config
from clawq.config_removed import REMOVED
from clawq.core import Entry
from clawq.errors import ArchiveDamaged, ConfigError, ExperienceGone, UserError
from clawq.programs import learner
from clawq.programs.bisect import Bisection
from clawq.programs.divergence import Limits
from clawq.programs.rerun import Order, rerun
from clawq.programs.run import open_run
from clawq.transport.log import RunLog


class Told:
    """A display that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, snapshot: Mapping[str, float | str]) -> None:
        assert snapshot["run"]

    def say(self, text: str) -> None:
        self.said.append(text)


def replayed(recorded: Recorded, *overrides: str, **order: Any) -> dict[str, Any]:
    """The report of a replay; its folder is whole."""
    report = rerun(recorded.recording(), Order(overrides, **order), Told(), threading.Event())
    folder = Path(report["folder"])
    assert json.loads((folder / "report.json").read_text())["updates"] == report["updates"]
    assert (folder / "metrics.jsonl").stat().st_size > 0
    assert list((folder / "checkpoints").glob("*.ckpt"))
    return report


def final_weights(report: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return dict(load_file(Path(report["folder"]) / "weights" / "final.safetensors"))


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def some_life(recorded: Recorded) -> None:
    """Two actors, a checkpoint in the midst, everything recorded to its end."""
    for _ in range(5):
        recorded.send("a")
        recorded.send("b", 2)
    recorded.learn(8)
    recorded.trainer.checkpoint(wait=True)
    recorded.send("a", 3)
    recorded.learn(4)
    recorded.end()


def test_a_replay_gives_the_recorded_weights_bit_for_bit_without_an_actor(record: Callable[..., Recorded]) -> None:
    # With rates that fall with the spent share of the budget, so that the recorded share counts too
    options = {"hidden": [8], "lr_final_fraction": 0.1}
    recorded = record(algorithm={"name": "td3", "options": options}, budget={"env_steps": 1000})
    some_life(recorded)
    report = replayed(recorded)
    assert report["mode"] == "exact"
    assert report["difference"] is None, report["difference"]
    assert report["final_weights"] == "identical"
    assert report["updates"] == report["identical_upto"] == recorded.trainer.parts.updater.updates
    assert report["fragments"] == len(recorded.sent)
    told = "\n".join(lines(report))
    assert f"identical up to update {report['updates']}" in told
    assert "bit for bit" in told
    # And it leaves the recorded run as it was, and says so of nothing that it did not compare
    assert not (recorded.run.folder / "report.json").exists()
    again = replayed(recorded, "metrics=[jsonl]", name="again")
    assert (again["mode"], again["run"]) == ("exact", "again")


def test_a_run_of_an_older_clawq_is_resumed_replayed_and_searched_without_the_keys_that_are_gone(
    record: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def aged(config: dict[str, Any]) -> dict[str, Any]:
        for path in REMOVED:
            *sections, key = path.split(".")
            at = config
            for section in sections:
                at[section] = at.get(section) or {}
                at = at[section]
            at[key] = "whatever it was"
        if config["replay"].get("demonstrations") == {"format": "whatever it was"}:
            config["replay"]["demonstrations"] = None
        return config

    facts_now = learner.session_facts

    def facts_then(*given: Any) -> dict[str, Any]:
        facts = facts_now(*given)
        return {**facts, "config": aged(facts["config"])}

    # Given a run folder as it was written then: schedule, run.json, config.yaml
    monkeypatch.setattr(learner, "session_facts", facts_then)
    recorded = record(budget={"env_steps": 1000})
    recorded.send("a", 3)
    recorded.learn(3)
    recorded.end()
    monkeypatch.undo()
    folder = recorded.run.folder
    kept = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**kept, "config": aged(kept["config"])}))
    (folder / "config.yaml").write_text(json.dumps(aged(recorded.run.config.model_dump(mode="json"))))
    # Then it opens as what it is, and what was left out is told
    assert open_run(folder, None).config == load_config(folder / "config.yaml") == recorded.run.config
    for file in ("run.json", "config.yaml"):
        told = [line for line in caplog.messages if line.startswith(str(folder / file))]
        assert sum("watchdog.memory_mb was removed in clawq 0.1.0: actors.recycle" in line for line in told) == 1
    # And it is replayed to the bit, and searched
    report = replayed(recorded)
    assert (report["mode"], report["difference"], report["final_weights"]) == ("exact", None, "identical")
    assert Bisection(recorded.recording(), Limits(), threading.Event(), lambda text: None).find().wrong is None
    # But what somebody wrote himself is a mistake, also for such a run
    with pytest.raises(ConfigError, match=r"watchdog\.memory_mb: was removed .* actors\.recycle\.memory_mb"):
        load_config(folder / "config.yaml", ["watchdog.memory_mb=1"])
    mine = folder.parent / "mine.yaml"
    mine.write_text((folder / "config.yaml").read_text())
    with pytest.raises(ConfigError, match=r"watchdog\.memory_mb: was removed .* actors\.recycle\.memory_mb"):
        load_config(mine)


def test_what_was_tuned_live_is_done_again_also_after_resumes(record: Callable[..., Recorded]) -> None:
    recorded = record()
    for words in (["rate_limit.samples_per_insert=1.5"], ["rate_limit.min_size_to_sample=60", "staleness.hard=50"]):
        recorded.send("a", 3)
        recorded.send("b", 3)
        recorded.learn(4)
        recorded.tune(*words)
        recorded.send("a", 2)
        recorded.learn(3)
        recorded.resume()
        recorded.send("b", 2)
        recorded.learn(3)
    assert recorded.trainer.parts.config.rate_limit.samples_per_insert == 1.5
    recorded.end()
    report = replayed(recorded)
    assert (report["mode"], report["difference"], report["final_weights"]) == ("exact", None, "identical")


def test_beyond_a_resume_with_another_configuration_nothing_is_compared_or_accused(
    record: Callable[..., Recorded],
) -> None:
    recorded = record()
    recorded.send("a", 6)
    recorded.learn(4)
    recorded.resume("replay.gamma=0.5")
    recorded.send("a", 2)
    recorded.learn(3)
    recording = recorded.end()
    updates = recorded.trainer.parts.updater.updates
    told = r"resumed with another configuration at update \d+: replay.gamma: was 0.9\d*, is 0.5. "
    with pytest.raises(UserError, match=told + "It can be replayed exactly up to there only"):
        replayed(recorded)
    # Otherwise, and in part, it can be replayed
    assert replayed(recorded, name="part", end="fragment:7")["fragments"] == 6
    # And no fragment is looked for behind what was changed by hand
    with pytest.raises(UserError, match=told + "Nothing goes wrong up to there"):
        Bisection(recording, Limits(), threading.Event(), lambda text: None).find()
    # What goes wrong before that is found all the same.
    verdict = Bisection(recording, Limits(bound=1e-12), threading.Event(), lambda text: None).find()
    assert verdict.wrong is not None
    assert verdict.updates < updates


def test_a_checkpoint_or_weights_that_differ_are_told_with_the_place(record: Callable[..., Recorded]) -> None:
    recorded = record()
    some_life(recorded)
    weights = recorded.run.weights / "final.safetensors"
    changed = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    changed["actor.0.bias"][1] += 1e-3
    save_file(changed, weights)
    [path] = recorded.trainer.parts.checkpoints.paths()
    from clawq.programs.checkpoint import load

    state = load(path).state
    state["algorithm"]["networks"]["critic"][3] += 1e-3
    recorded.trainer.parts.checkpoints.save(state, int(state["updates"]))
    report = replayed(recorded)
    assert "algorithm.networks.critic: 1 of" in report["difference"]
    assert report["final_weights"].startswith("actor.0.bias: 1 of 8 numbers")
    told = "\n".join(lines(report))
    assert "FIRST DIFFERENCE at update" in told
    assert "FINAL WEIGHTS DIFFER" in told


def test_what_a_new_version_masks_before_a_checkpoint_of_the_same_update_is_no_difference(
    record: Callable[..., Recorded],
) -> None:
    rare = {"device": "cpu", "publish_interval_s": 3600, "checkpoint_interval_s": 3600}
    recorded = record(staleness={"hard": 5}, learner=rare)
    recorded.send("a", 5)
    recorded.learn(8)
    for _ in range(8):
        recorded.trainer.publish()
    assert recorded.trainer.parts.ageing.expired > 0
    recorded.trainer.checkpoint(wait=True)
    recorded.end()
    report = replayed(recorded)
    assert report["difference"] is None, report["difference"]
    assert report["identical_upto"] == report["updates"] == recorded.trainer.parts.updater.updates


def test_with_another_configuration_or_seed_the_same_experience_gives_other_weights(
    record: Callable[..., Recorded],
) -> None:
    recorded = record()
    some_life(recorded)
    before = dict(load_file(recorded.run.weights / "final.safetensors"))
    first, again = (replayed(recorded, "algorithm.options.lr_actor=0.01") for _ in range(2))
    assert first["mode"] == "free"
    assert first["changed"] == ["algorithm.options.lr_actor: was 0.001, is 0.01"]
    assert first["fragments"] == len(recorded.sent)
    assert first["run"] != again["run"]
    assert same(final_weights(first), final_weights(again)), "a replay depends on nothing but log and configuration"
    assert not same(final_weights(first), before)
    seeded = replayed(recorded, seed=7)
    assert not same(final_weights(seeded), final_weights(first))
    # The limiter decides: as many updates as the env steps call for, within its bounds
    wide = replayed(recorded, "rate_limit.samples_per_insert=4", "rate_limit.error_buffer=null")
    assert wide["updates"] > first["updates"]
    # Without one, as many as there were
    unlimited = replayed(recorded, "rate_limit.samples_per_insert=null", "rate_limit.error_buffer=null")
    assert unlimited["updates"] == recorded.trainer.parts.updater.updates


def test_a_part_of_the_log_is_replayed_and_one_that_is_gone_is_refused_with_what_is_held(
    record: Callable[..., Recorded],
) -> None:
    recorded = record()
    some_life(recorded)
    part = replayed(recorded, begin="fragment:4", end="fragment:12")
    assert (part["fragments"], part["ended"]) == (8, "the end of the range")
    steps = STEPS * ENVS
    assert replayed(recorded, begin=str(3 * steps), end=str(9 * steps))["fragments"] == 6
    with pytest.raises(UserError, match=r"'yesterday' is no place in a log; allowed are fragment:N"):
        replayed(recorded, begin="yesterday")
    folders = set(recorded.run.folder.parent.iterdir())
    with pytest.raises(UserError, match=r"--from fragment:12 is not before --to fragment:4"):
        replayed(recorded, begin="fragment:12", end="fragment:4")
    with pytest.raises(UserError, match=r"no fragment in that range; .* 18 fragments, with 360 env steps"):
        replayed(recorded, begin="fragment:1000")
    with pytest.raises(ConfigError, match=r"algorithm.options.lr_acter.*lr_actor"):
        replayed(recorded, "algorithm.options.lr_acter=1")
    # Given a log that lost its first five fragments
    for slot, epoch, seq in recorded.sent[:5]:
        recorded.data.xdel(recorded.keys.stream(slot), f"{epoch}-{seq}")
    with pytest.raises(ExperienceGone, match=r"does not hold fragment .* all from number 6 on: .*--from fragment:6"):
        replayed(recorded)
    with pytest.raises(UserError, match="env steps cannot be counted"):
        replayed(recorded, begin="100")
    # What came to nothing leaves no folder behind
    assert set(recorded.run.folder.parent.iterdir()) == folders
    assert replayed(recorded, begin="fragment:6")["fragments"] == len(recorded.sent) - 5


def test_a_fragment_that_cannot_be_read_is_not_among_those_that_are_offered(
    record: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, true = record(), RunLog.get
    some_life(recorded)

    def get(log: RunLog, slot: str, epoch: int, seq: int) -> Entry:
        if (slot, epoch, seq) == recorded.sent[4]:
            raise ArchiveDamaged("its record is damaged")
        return true(log, slot, epoch, seq)

    monkeypatch.setattr(RunLog, "get", get)
    with pytest.raises(ExperienceGone, match=r"damaged\. .* --from fragment:6; those before it with --to fragment:5"):
        replayed(recorded)
    assert replayed(recorded, end="fragment:5")["fragments"] == 4
    assert replayed(recorded, begin="fragment:6")["fragments"] == len(recorded.sent) - 5


def test_a_schedule_that_was_cut_off_is_told_with_where_it_ends(record: Callable[..., Recorded]) -> None:
    recorded = record()
    some_life(recorded)
    schedule = recorded.run.folder / "schedule.log"
    kept = schedule.read_bytes().split(b"\nu ")[0]
    schedule.write_bytes(kept + b"\n")
    report = rerun(recorded.recording(), Order(), Told(), threading.Event())
    assert "the schedule ends at update 0, before the checkpoint at update" in report["difference"]


def test_a_replay_that_is_stopped_keeps_what_it_has(record: Callable[..., Recorded]) -> None:
    recorded = record()
    some_life(recorded)
    looks = count()
    report = rerun(recorded.recording(), Order(), Told(), Until(lambda: next(looks) > 5))
    assert report["ended"] == "stopped by the user"
    assert 0 < report["fragments"] < len(recorded.sent)
    assert (Path(report["folder"]) / "weights" / "final.safetensors").exists()
    assert "final_weights" not in report
