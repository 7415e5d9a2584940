"""The intake: what is committed, what is refused at the last moment; the books know of both."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawq.programs.intake import Intake
from clawq.programs.recorder import Recorder
from clawq.programs.schedule import SCHEDULE_FILE, FragmentCommitted, RowsVoided, read_schedule
from clawq.replay.consumer import Consumer
from clawq.replay.rate_limiter import RateLimiter
from clawq.replay.ring import ReplayRing
from clawq.replay.staleness import StalenessRule
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot
from clawq.transport.codec import decode, encode
from clawq.transport.memory import MemoryTransport
from clawq.types import Voided

Eventually = Callable[..., None]
STEPS, ENVS = 5, 4


class Watched:
    """An algorithm that only counts what its normaliser would see."""

    def __init__(self) -> None:
        self.rows = 0

    def observe(self, obs: Mapping[str, Any], valid: Any) -> None:
        self.rows += int(valid.sum())


class Table:
    """An actor's slot in memory, the learner's consumer and its intake."""

    def __init__(self, folder: Path) -> None:
        transport = MemoryTransport()
        self.version = 1
        self.sink = transport.sink("s")
        self.true = TrueSlot("s", ENVS, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
        self.true.epoch = self.sink.epoch
        self.ring, self.limiter = ReplayRing(SPEC, 1000), RateLimiter(1.0, 20, 20, batch_size=20, largest_insert=20)
        self.consumer = Consumer(
            transport.source(),
            Examiner(decode, FragmentCheck(SPEC, RUN)),
            StalenessRule(hard=2),
            lambda: self.version,
            lambda entry, reason, detail: None,
        ).start()
        self.algorithm = Watched()
        algorithm: Any = self.algorithm
        self.recorder = Recorder(folder / SCHEDULE_FILE)
        self.recorder.begin({"n": 1})
        self.intake = Intake(self.consumer, self.ring, self.limiter, algorithm, self.recorder)

    def send(self, voided: tuple[Voided, ...] = ()) -> None:
        made = self.true.fragment(STEPS, self.version, voided)[0]
        self.sink.send(made.meta.seq, encode(made))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path)
    yield table
    table.consumer.close()
    table.recorder.close()


def test_what_grew_too_old_while_the_limiter_held_it_back_is_refused_and_counted_as_waste(
    table: Table, eventually: Eventually
) -> None:
    for _ in range(2):
        table.send()
    eventually(lambda: table.intake.commit(2, 1) or table.intake.fragments == 2, "two fragments in the ring")
    table.send(voided=(Voided(1, 2, 3),))
    eventually(lambda: table.intake.commit(1, 1) == 0 and table.intake.blocked, "a fragment that is held back")
    before = table.ring.size
    table.version = 4
    assert table.intake.commit(1, table.version) == 0
    assert not table.intake.blocked
    counts = table.consumer.counts
    assert (counts.committed, counts.rejected, counts.stale_steps) == (2, {"stale": 1}, STEPS * ENVS)
    assert counts.produced_steps == 3 * STEPS * ENVS == counts.committed_steps + counts.refused_steps
    # The limiter was not charged for it, and what it said of earlier rows holds.
    assert table.limiter.inserts == table.algorithm.rows == 2 * STEPS * ENVS
    assert before - table.ring.size == 2
    assert table.consumer.check_valid() == (True, "")
    assert table.limiter.check_valid() == (True, "")
    # The schedule has it too: a replay must heed the same notice at the same place.
    table.recorder.close()
    done = list(read_schedule(table.recorder.path))
    epoch = table.sink.epoch
    assert [one for one in done if isinstance(one, FragmentCommitted)] == [
        FragmentCommitted("s", epoch, 1, 1),
        FragmentCommitted("s", epoch, 2, 1),
    ]
    assert done[-1] == RowsVoided("s", epoch, Voided(1, 2, 3))
