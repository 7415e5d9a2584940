"""`clawq log ls | show | dlq | export` on a run with streams and an archive, and on what is left when Redis is gone."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from clawq.cli.main import run
from clawq.config import RunConfig
from clawq.core import Entry
from clawq.programs.episode_hdf5 import read_hdf5
from clawq.replay.validation import Examiner, Fault, FragmentCheck
from clawq.testing.experience import SPEC, Chances, TrueSlot
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.codec import decode, encode
from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.dead_letters import DeadLetters
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from clawq.types import EpisodeSummary, Provenance

MADE_BY = Provenance("host-1", "testing:experience", "0.9", "abcdef123456")


class Demo:
    """A run of two slots: of 20 fragments each the first 15 are archived, the last 10 are in the streams."""

    def __init__(self, data: Any, registry: RunRegistry, keys: RunKeys, folder: Path) -> None:
        self.data, self.registry, self.keys, self.folder = data, registry, keys, folder
        self.id = f"demo-{keys.tag[:8]}"
        self.entries: list[Entry] = []
        config = RunConfig.model_validate({"name": "demo", "environment": {"name": "point"}}).model_dump(mode="json")
        folder.mkdir()
        facts = {"id": self.id, "tag": keys.tag, "pid": 1, "config": config, "spec": SPEC.to_json()}
        (folder / "run.json").write_text(json.dumps(facts))
        self.record = RunRecord(self.id, keys.tag, config, SPEC.to_json(), "running", 1, {"folder": str(folder)})
        registry.add(self.record)
        self.now_ms = int(time.time() * 1000)
        self._send()

    def _send(self) -> None:
        rng, ids = np.random.default_rng(0), itertools.count(1)
        slots = [TrueSlot(f"w{i}-0", 2, rng, ids, chances=Chances(0.2, 0.0), epoch=1000) for i in range(2)]
        writer = ArchiveWriter(self.folder / "archive", self.keys.tag, ArchiveLimits(20_000))
        for index in range(40):
            slot = slots[index % 2]
            fragment, _ = slot.fragment(5, weights_version=index)
            episodes = (EpisodeSummary(1, 12, -3.5, 1.0),) if index == 39 else ()
            meta = replace(
                fragment.meta, run=self.keys.tag, worker=f"worker-{index % 2}", made_by=MADE_BY, episodes=episodes
            )
            fragment = replace(fragment, meta=replace(meta, created_ms=self.now_ms - 60_000 * (40 - index)))
            entry = Entry(slot.name, 1000, slot.seq, bytes(encode(fragment)))
            self.entries.append(entry)
            if index < 30:
                writer.append(entry)
            if index >= 20:
                self.data.hset(self.keys.slots, slot.name, json.dumps({"worker": "w", "epoch": 1000}))
                self.data.xadd(self.keys.stream(slot.name), {"f": entry.payload}, id=f"1000-{slot.seq}")
        writer.close()

    def lose_redis(self) -> None:
        """What the run left in Redis is gone."""
        self.registry.remove(self.id)
        self.data.delete(self.keys.slots, *(self.keys.stream(slot) for slot in ("w0-0", "w1-0")))


@pytest.fixture
def demo(
    redis_servers: EmbeddedRedis,
    broker_client: redis.Redis,
    data_client: redis.Redis,
    run_keys: RunKeys,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Demo]:
    monkeypatch.setenv("CLAWQ_BROKER_URL", redis_servers.broker_url)
    monkeypatch.setenv("CLAWQ_DATA_URL", redis_servers.data_url)
    registry = RunRegistry(broker_client)
    made = Demo(data_client, registry, run_keys, tmp_path / "run")
    yield made
    registry.remove(made.id)


@pytest.fixture
def clawq(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`clawq(...)`: (status, stdout, stderr) of a command."""

    def call(*words: str) -> tuple[int, str, str]:
        status = run(list(words))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


Call = Callable[..., tuple[int, str, str]]


def listed(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_fragments_are_listed_in_order_with_where_they_come_from(demo: Demo, clawq: Call) -> None:
    status, out, _ = clawq("log", "ls", demo.id, "--json")
    rows = listed(out)
    assert status == 0
    assert [(row["slot"], row["id"]) for row in rows] == [(e.slot, f"{e.epoch}-{e.seq}") for e in demo.entries]
    assert [row["place"] for row in rows] == ["archive"] * 30 + ["streams"] * 10
    assert [row["weights_version"] for row in rows] == list(range(40))
    for row in rows:
        assert (row["host"], row["env"], row["clawq"], row["commit"]) == (
            "host-1",
            "testing:experience",
            "0.9",
            "abcdef123456",
        )
        assert (row["seed"], row["steps"], row["envs"]) == (7, 5, 2)
    status, out, _ = clawq("log", "ls", demo.id, "--limit", "3")
    lines = out.splitlines()
    assert lines[0].split() == ["made", "slot", "id", "worker", "weights", "steps", "bytes", "in", "clawq"]
    assert lines[3].split()[1:6] == ["w1-0", "1000-20", "worker-1", "39", "5x2"]
    assert lines[3].endswith("streams  0.9@abcdef123456")
    assert lines[4] == f"20 fragments in the streams, 30 in the archive {demo.folder / 'archive'}; 2 slots"


def test_the_list_is_narrowed_by_slot_worker_and_time(demo: Demo, clawq: Call) -> None:
    one = listed(clawq("log", "ls", demo.id, "--json", "--slot", "w1-0")[1])
    assert {row["slot"] for row in one} == {"w1-0"}
    assert len(one) == 20
    assert listed(clawq("log", "ls", demo.id, "--json", "--worker", "worker-1")[1]) == one
    recent = listed(clawq("log", "ls", demo.id, "--json", "--since", "10.5m")[1])
    assert [row["weights_version"] for row in recent] == list(range(30, 40))
    old = listed(clawq("log", "ls", demo.id, "--json", "--until", "10.5m")[1])
    assert [row["weights_version"] for row in old] == list(range(30))
    status, out, _ = clawq("log", "ls", demo.id, "--worker", "nobody")
    assert status == 0
    assert "no fragments match; it holds 2 slots" in out
    status, _, err = clawq("log", "ls", demo.id, "--slot", "absent")
    assert (status, "holds nothing of absent; it holds 2 slots" in err) == (2, True)
    assert clawq("log", "ls", demo.id, "--since", "yesterday")[0] == 2


def test_the_log_outlives_redis_in_its_folder(demo: Demo, clawq: Call) -> None:
    demo.lose_redis()
    status, out, _ = clawq("log", "ls", str(demo.folder), "--json")
    assert status == 0
    assert [row["weights_version"] for row in listed(out)] == list(range(30))
    assert "no streams here, 30 in the archive" in clawq("log", "ls", str(demo.folder))[1]
    # And without any Redis
    status, _, err = clawq("log", "show", str(demo.folder), "w1-0", "1000-20")
    assert status == 2
    assert "does not hold fragment w1-0 1000-20; of w1-0 it holds 1000-1 to 1000-15" in err
    for file in (demo.folder / "archive").iterdir():
        file.unlink()
    (demo.folder / "archive").rmdir()
    status, _, err = clawq("log", "ls", str(demo.folder))
    assert status == 2
    assert "its streams are not on this Redis" in err
    assert "archive.enabled" in err


def test_one_fragment_is_shown_with_its_columns_and_its_fate(demo: Demo, clawq: Call) -> None:
    demo.data.hset(demo.keys.cursors(), "w1-0", "1000-13")
    status, out, _ = clawq("log", "show", demo.id, "w1-0", "1000-12", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["place"] == "archive and streams"
    assert facts["fate"] == "taken over by the learner"
    assert facts["columns"]["obs.state"]["shape"] == [6, 2, 3]
    assert facts["columns"]["valid"] == {"shape": [5, 2], "dtype": "bool", "true": 10}
    status, out, _ = clawq("log", "show", demo.id, "w1-0", "1000-20")
    assert "not taken over by the learner yet" in out
    assert "worker-1 on host-1" in out
    assert "0.9, commit abcdef123456" in out
    assert "episode of env 1 ended: 12 steps, return -3.5, success 1" in out
    assert clawq("log", "show", demo.id, "w1-0", "twelve")[0] == 2


def test_what_comes_off_the_wire_cannot_act_on_the_terminal(demo: Demo, clawq: Call) -> None:
    rng = np.random.default_rng(0)
    fragment, _ = TrueSlot("w0-0", 2, rng, itertools.count(1), epoch=2000).fragment(3)
    meta = replace(fragment.meta, run=demo.keys.tag, worker="\x1b[2Jevil", made_by=replace(MADE_BY, host="h\r\n\x07"))
    payload = bytes(encode(replace(fragment, meta=meta)))
    demo.data.xadd(demo.keys.stream("w0-0"), {"f": payload}, id="2000-1")
    demo.data.xadd(demo.keys.stream("w0-0"), {"f": b"garbage"}, id="2000-2")
    for words in (("ls", demo.id), ("show", demo.id, "w0-0", "2000-1"), ("show", demo.id, "w0-0", "2000-2")):
        status, out, _ = clawq("log", *words)
        assert status == 0
        assert not {"\x1b", "\x07", "\r"} & set(out)
    assert "corrupt: only 7 bytes" in out
    assert "?[2Jevil" in clawq("log", "ls", demo.id)[1]


def test_an_export_holds_the_whole_log(demo: Demo, clawq: Call, tmp_path: Path) -> None:
    status, out, _ = clawq("log", "export", demo.id, "--format", "hdf5", "--out", str(tmp_path / "out"))
    assert status == 0
    episodes = list(read_hdf5(tmp_path / "out", SPEC))
    assert sum(episode.steps for episode in episodes) == 40 * 10
    assert f"{len(episodes)} episodes, 400 steps" in out
    words = ("--slot", "w0-0", "--since", "10.5m", "--max-steps", "20", "--incomplete", "skip")
    status, out, _ = clawq("log", "export", demo.id, "--format", "hdf5", "--out", str(tmp_path / "few.h5"), *words)
    assert status == 0
    few = list(read_hdf5(tmp_path / "few.h5", SPEC))
    assert {episode.meta.slot for episode in few} == {"w0-0"}
    assert all(episode.complete for episode in few)


def test_an_export_of_what_the_log_does_not_hold_is_refused_and_leaves_nothing(
    demo: Demo, clawq: Call, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("log", "export", demo.id, "--format", "hdf5", "--out", str(out))
    status, _, err = clawq(*words, "--since", "1s")
    assert (status, "there is nothing to export" in err) == (2, True)
    for file in (demo.folder / "archive").iterdir():
        file.unlink()
    (demo.folder / "archive").rmdir()
    status, _, err = clawq(*words, "--since", "2020-01-01")
    assert (status, "does not reach back to 2020-01-01" in err) == (2, True)
    assert not out.exists()


@pytest.fixture
def refused(demo: Demo) -> Demo:
    """Three of the run's fragments were refused: a flipped bit, another wire version, another run's."""
    letters = DeadLetters(demo.data, demo.keys)
    good = demo.entries[-1]
    flipped, version = bytearray(good.payload), bytearray(good.payload)
    flipped[-20] ^= 1
    version[4] ^= 0x40
    foreign = decode(good.payload)
    foreign = replace(foreign, meta=replace(foreign.meta, run="f" * 32, slot="x", seq=3))
    examiner = Examiner(decode, FragmentCheck(SPEC, demo.keys.tag))
    for seq, payload in enumerate((bytes(flipped), bytes(version), bytes(encode(foreign))), 1):
        entry = Entry("x", 1000, seq, payload)
        fault = examiner.examine(entry)
        assert isinstance(fault, Fault)
        letters.append(entry, fault.reason, fault.detail)
    return demo


def test_dead_letters_are_listed_with_their_reasons(refused: Demo, clawq: Call) -> None:
    status, out, _ = clawq("log", "dlq", "ls", refused.id)
    assert status == 0
    rows = [line.split()[1:4] for line in out.splitlines()[1:4]]
    assert rows == [["x", "1000-1", "corrupt"], ["x", "1000-2", "wire_version"], ["x", "1000-3", "run"]]
    assert out.splitlines()[-1] == "refused: 1 corrupt, 1 run, 1 wire_version"
    [row] = listed(clawq("log", "dlq", "ls", refused.id, "--reason", "run", "--json")[1])
    assert row["header"]["worker"] == "worker-1"
    assert f"this is run {refused.keys.tag}" in row["detail"]
    status, out, _ = clawq("log", "dlq", "show", refused.id, "x", "1000-1")
    assert "the checksum is wrong" in out
    assert "whole" in out
    status, _, err = clawq("log", "dlq", "show", refused.id, "x", "1000-9")
    assert (status, "there is no dead letter of x 1000-9" in err) == (2, True)


def test_a_bundle_reproduces_the_refusal_elsewhere(
    refused: Demo, clawq: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = clawq("log", "dlq", "export", refused.id, "--out", "bundles")
    assert (status, out) == (0, "3 of 3 dead letters: bundles\n")
    facts = json.loads(Path("bundles/x-1000-2/letter.json").read_text())
    assert (facts["reason"], facts["run"], facts["tag"]) == ("wire_version", refused.id, refused.keys.tag)
    assert facts["spec"] == SPEC.to_json()
    # Without any Redis, and by the command that stands in the bundle
    monkeypatch.setenv("CLAWQ_DATA_URL", f"unix://{tmp_path}/absent")
    monkeypatch.chdir("bundles")
    for seq, reason in enumerate(("corrupt", "wire_version", "run"), 1):
        command = json.loads(Path(f"x-1000-{seq}/letter.json").read_text())["command"].split()
        status, out, _ = clawq(*command[1:])
        assert status == 0
        assert out.startswith(f"refused: {reason}: ")
    # An entry that is fine by now is told, with another status
    Path("x-1000-1/entry.bin").write_bytes(refused.entries[-1].payload)
    facts = json.loads(Path("x-1000-1/letter.json").read_text())
    Path("x-1000-1/letter.json").write_text(json.dumps({**facts, "slot": "w1-0", "id": "1000-20"}))
    status, out, _ = clawq("log", "dlq", "check", "x-1000-1")
    assert (status, out.startswith("not refused here; recorded: corrupt")) == (1, True)
    Path("x-1000-1/letter.json").write_text("{}")
    status, _, err = clawq("log", "dlq", "check", "x-1000-1")
    assert (status, "letter.json is damaged: the key .format. is missing" in err.replace("'", ".")) == (2, True)
    assert clawq("log", "dlq", "check", "absent")[0] == 2


def test_of_a_letter_without_its_bytes_there_is_no_bundle(refused: Demo, clawq: Call, tmp_path: Path) -> None:
    for seq in range(10):
        DeadLetters(refused.data, refused.keys).append(Entry("y", 1, seq, bytes(1_000_000)), "corrupt")
    status, out, err = clawq("log", "dlq", "export", refused.id, "--out", str(tmp_path / "out"))
    assert (status, out.startswith("11 of 13 dead letters")) == (1, True)
    assert "of y 1-0 only the first 4096 of 1000000 bytes are kept" in err
    status, _, err = clawq("log", "dlq", "export", refused.id, "y", "1-0", "--out", str(tmp_path / "one"))
    assert (status, "only the first 4096" in err) == (2, True)
    status, _, err = clawq("log", "dlq", "export", refused.id, "y", "1-9", "--out", str(tmp_path / "out"))
    assert (status, "exists already" in err) == (2, True)


def test_refused_entries_are_found_in_the_archive_when_redis_is_gone(demo: Demo, clawq: Call, tmp_path: Path) -> None:
    writer = ArchiveWriter(demo.folder / "archive", demo.keys.tag, ArchiveLimits())
    writer.append(Entry("x", 1, 1, demo.entries[0].payload))
    writer.close()
    demo.lose_redis()
    status, out, _ = clawq("log", "dlq", "ls", str(demo.folder))
    assert status == 0
    assert out.splitlines()[-1] == "refused: 1 identity (found by examining the archive)"
    status, _, _ = clawq("log", "dlq", "export", str(demo.folder), "x", "1-1", "--out", str(tmp_path / "one"))
    assert status == 0
    assert clawq("log", "dlq", "check", str(tmp_path / "one"))[0] == 0
