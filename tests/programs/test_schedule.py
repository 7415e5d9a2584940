"""The recorded schedule: what is written is read, at any position, and damage is told."""

import errno
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawq.errors import CheckpointNotWritten, ScheduleInvalid
from clawq.programs import recorder as recorder_module
from clawq.programs.recorder import Recorder
from clawq.programs.schedule import (
    FragmentCommitted,
    LiveChange,
    Record,
    SessionBegun,
    UpdatesTried,
    WeightsPublished,
    older,
    read_base,
    read_positions,
    read_schedule,
)
from clawq.types import Voided

#: What `random_life` of 50 things may take, at the most.
LARGEST_LIFE_BYTES = 6000
SESSION = {"n": 1, "version": 0, "torch": "2.9"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "schedule.log"


def begun(path: Path, position: int = 0, **facts: Any) -> Recorder:
    recorder = Recorder(path)
    recorder.begin({**SESSION, **facts}, position)
    return recorder


def merged(records: list[Record]) -> list[Record]:
    """Neighbouring stretches of updates as one: a block, or a flush, may cut a stretch."""
    found: list[Record] = []
    for record in records:
        last = found[-1] if found else None
        if (
            isinstance(record, UpdatesTried)
            and isinstance(last, UpdatesTried)
            and (last.progress, last.version) == (record.progress, record.version)
        ):
            found[-1] = UpdatesTried(last.count + record.count, record.progress, record.version)
        else:
            found.append(record)
    return found


def random_life(rng: random.Random, recorder: Recorder, length: int) -> list[Record]:
    """Record things at random; what a reader must find."""
    told: list[Record] = []
    seqs: dict[tuple[str, int], int] = {}
    version, thousandths = recorder._version, recorder._thousandths
    for _ in range(length):
        kind = rng.choice(["f", "f", "f", "u", "u", "w", "p", "change", "flush", "mark"])
        if kind == "f":
            slot, epoch = rng.choice(["a", "b:1", "host-w1-3"]), rng.choice([7, 1_764_450_000_000])
            seq = seqs[slot, epoch] = seqs.get((slot, epoch), 0) + rng.choice([1, 1, 1, 3])
            notices = (Voided(rng.randrange(4), seq, 2), Voided(5, 1, 0))[: rng.choice([0, 0, 1, 2])]
            recorder.committed(slot, epoch, seq, version, notices)
            told.append(FragmentCommitted(slot, epoch, seq, version, notices))
        elif kind == "u":
            for _ in range(rng.randrange(1, 5)):
                recorder.updated(thousandths)
                told.append(UpdatesTried(1, thousandths / 1000, version))
        elif kind == "w":
            version += 1
            recorder.published(version)
            told.append(WeightsPublished(version))
        elif kind == "p":
            thousandths = min(1000, thousandths + rng.randrange(3))
        elif kind == "change":
            facts = {"key": rng.random(), "text": "ä\nb"}
            recorder.changed("tune", facts)
            told.append(LiveChange("tune", facts))
        elif kind == "flush":
            recorder.flush()
        else:
            recorder.mark()
    return told


@pytest.mark.parametrize("seed", range(3))
def test_what_was_recorded_is_read_in_its_order(path: Path, seed: int) -> None:
    recorder = begun(path)
    told = random_life(random.Random(seed), recorder, 3000)
    recorder.close()
    found = list(read_schedule(path))
    assert found[0] == SessionBegun(SESSION)
    assert merged(found[1:]) == merged(told)


def test_reading_may_begin_at_every_position_and_gives_the_same_end(path: Path) -> None:
    recorder = begun(path)
    random_life(random.Random(3), recorder, 300)
    recorder.close()
    records = list(read_positions(path))
    for position in sorted({position for position, _ in records})[:-1]:
        # What is in force is told anew at the beginning.
        later = [r for at, r in records if at > position]
        tail = list(read_schedule(path, position))
        if isinstance(tail[0], WeightsPublished) and tail[0] != later[0]:
            tail.pop(0)
        assert tail == later


def test_a_resumed_learner_cuts_off_what_lies_behind_its_checkpoint(path: Path) -> None:
    first = begun(path)
    first.committed("a", 7, 1, 0)
    first.updated(0)
    position = first.mark()
    first.committed("a", 7, 2, 0)
    first.updated(0)
    # Given some that was written and some that was not when it was killed
    first.flush()
    first.updated(0)
    assert first._file is not None
    first._file.close()
    second = begun(path, position, n=2, version=5)
    second.committed("a", 7, 2, 6)
    second.close()
    assert list(read_schedule(path)) == [
        SessionBegun(SESSION),
        FragmentCommitted("a", 7, 1, 0),
        UpdatesTried(1, 0.0, 0),
        WeightsPublished(5),
        SessionBegun({**SESSION, "n": 2, "version": 5}),
        WeightsPublished(6),
        FragmentCommitted("a", 7, 2, 6),
    ]


@pytest.mark.parametrize("position", [57, 5000, -1])
def test_where_the_past_is_not_whole_the_schedule_begins_anew_and_keeps_what_there_is(
    path: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = begun(path)
    first.committed("a", 7, 1, 0)
    first.close()
    before = path.read_bytes()
    second = begun(path, position, n=2)
    second.close()
    assert path.with_name("schedule.log.old").read_bytes() == before
    assert list(read_schedule(path)) == [SessionBegun({**SESSION, "n": 2})]
    assert "begins anew" in caplog.text
    if position > 0:
        assert list(read_schedule(path, position)) == [SessionBegun({**SESSION, "n": 2})]
        with pytest.raises(ScheduleInvalid, match=f"begins at {position}"):
            list(read_schedule(path, 20))


def test_a_torn_end_is_passed_over_wherever_it_tore(path: Path) -> None:
    recorder = begun(path)
    recorder.committed("a", 7, 1, 0)
    recorder.mark()
    recorder.committed("a", 7, 12, 0)
    recorder.updated(3)
    recorder.close()
    whole, records = path.read_bytes(), list(read_schedule(path))
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size])
        found = list(read_schedule(path))
        assert found == records[: len(found)]
    path.write_bytes(whole[:-1])
    assert len(list(read_schedule(path))) == len(records)


def test_a_damaged_block_is_told_with_its_place_and_nothing_of_it_is_believed(path: Path) -> None:
    recorder = begun(path)
    recorder.committed("a", 7, 1, 0)
    at = recorder.mark()
    recorder.committed("b", 7, 1, 0)
    recorder.close()
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for place in range(header + at, len(whole) - 1):
        spoilt = bytearray(whole)
        spoilt[place] ^= 0x04
        path.write_bytes(spoilt)
        found: list[Record] = []
        with pytest.raises(ScheduleInvalid, match=r"schedule\.log: (damaged between bytes \d+ and \d+|the line)"):
            found.extend(read_schedule(path))
        # (Without its mark the last block counts as an unfinished one, whose lines are read as far as they go.)
        if whole[place] != ord("#"):
            assert FragmentCommitted("b", 7, 1, 0) not in found


@pytest.mark.parametrize("text", ["", "hello\n", "clawq-schedule 9 base=0\n", "clawq-schedule 1 base=x\n"])
def test_another_file_is_refused_by_its_first_line(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ScheduleInvalid, match=r"not a schedule|format 9; this clawq reads format 1"):
        list(read_schedule(path))


def test_a_missing_schedule_is_named(path: Path) -> None:
    with pytest.raises(ScheduleInvalid, match=r"schedule\.log: cannot be read: No such file"):
        list(read_schedule(path))


class Disk:
    """Stands between a recorder and its file; full when told."""

    def __init__(self, file: Any) -> None:
        self._file, self.full = file, False

    def write(self, chunk: bytes) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        # A disk may take a part only.
        return int(self._file.write(chunk[:100]))

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@contextmanager
def disk_of(recorder: Recorder) -> Iterator[Disk]:
    disk = Disk(recorder._file)
    recorder._file = disk  # type: ignore[assignment]
    yield disk


def test_a_disk_that_is_full_for_a_while_costs_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = begun(path)
    with disk_of(recorder) as disk:
        told = random_life(random.Random(1), recorder, 100)
        disk.full = True
        told += random_life(random.Random(2), recorder, 100)
        recorder.flush()
        recorder.flush()
        assert caplog.text.count("No space left") == 1
        with pytest.raises(CheckpointNotWritten, match="No space left"):
            recorder.sync()
        disk.full = False
        recorder.close()
    kinds = (FragmentCommitted, LiveChange)
    assert [r for r in read_schedule(path) if isinstance(r, kinds)] == [r for r in told if isinstance(r, kinds)]


def test_what_waits_for_a_full_disk_is_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_WAITING_BYTES", 1000)
    recorder = begun(path)
    with disk_of(recorder) as disk:
        disk.full = True
        with caplog.at_level(logging.WARNING):
            for seq in range(1, 2000):
                recorder.committed("a", 7, seq, 0)
                recorder.flush()
        assert "nothing is recorded any more" in caplog.text
        assert recorder.mark() == -1
        recorder.sync()
        recorder.close()


def test_an_hour_at_ten_fragments_a_second_takes_less_than_half_a_megabyte(path: Path) -> None:
    recorder, seqs = begun(path), [0, 0, 0]
    for second in range(3600):
        recorder.published(second)
        for turn in range(10):
            slot = turn % 3
            seqs[slot] += 1
            recorder.committed(f"some-longer-hostname-{slot}", 1_764_450_000_000 + slot, seqs[slot], second)
            for _ in range(37):
                recorder.updated(second * 1000 // 3600)
    recorder.close()
    assert path.stat().st_size < 500_000


def test_of_a_very_long_run_the_newest_part_is_kept_in_two_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FILE_BYTES", 2000)
    monkeypatch.setattr(recorder_module, "BLOCK_BYTES", 300)
    recorder, told, positions, rng = begun(path), [], [], random.Random(0)
    for _ in range(40):
        told += random_life(rng, recorder, 50)
        positions.append((recorder.mark(), len(told)))
        if rng.random() < 0.3:
            recorder.sync()
    recorder.close()
    files = {one.name: one.stat().st_size for one in path.parent.iterdir()}
    assert sorted(files) == ["schedule.1.log", "schedule.log"]
    assert max(files.values()) < 2000 + LARGEST_LIFE_BYTES
    # What there is, is the end of what was recorded, across the two files.
    found = merged(list(read_schedule(path)))
    assert len(found) > 60
    assert found[-60:] == merged(told)[-60:]
    # A resumed learner may go back behind the turn of the file.
    with path.open("rb") as file:
        base = read_base(path, file.readline())
    behind, count = max((at, count) for at, count in positions if at < base)
    second = begun(path, behind, n=2, version=7)
    second.committed("z", 1, 1, 7)
    second.close()
    assert not older(path).exists()
    found = list(read_schedule(path))
    assert found[-1] == FragmentCommitted("z", 1, 1, 7)
    kept = merged([one for one in found[:-2] if not isinstance(one, WeightsPublished)])
    before = merged([one for one in told[:count] if not isinstance(one, WeightsPublished)])
    assert len(kept) > 10
    assert kept[1:] == before[1 - len(kept) :]


def test_a_kill_in_the_midst_of_the_turn_of_the_file_loses_nothing(path: Path) -> None:
    recorder = begun(path)
    recorder.committed("a", 1, 1, 0)
    position = recorder.mark()
    recorder.close()
    # Given a file that was put aside, and no new one yet
    path.replace(older(path))
    second = begun(path, position, n=2)
    second.close()
    found = list(read_schedule(path))
    assert FragmentCommitted("a", 1, 1, 0) in found
    assert sum(isinstance(record, SessionBegun) for record in found) == 2


def test_short_or_odd_words_cannot_name_a_live_change(path: Path) -> None:
    recorder = begun(path)
    for kind in ("abc", "session", "two words", "Tune", ""):
        with pytest.raises(ValueError, match="cannot name"):
            recorder.changed(kind, {})
    recorder.close()
