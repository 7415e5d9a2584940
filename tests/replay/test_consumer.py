"""The consumer: everything read is settled once, whatever comes, and it never dies silently."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.acting.outbox import Outbox
from clawq.acting.sender import Sender
from clawq.core import Entry
from clawq.errors import StoreFull, StoreUnavailable
from clawq.replay.consumer import Consumer
from clawq.replay.rebuild import Rebuild
from clawq.replay.ring import ReplayRing
from clawq.replay.staging import Staged, Staging
from clawq.replay.staleness import StalenessRule
from clawq.replay.traces import Traces
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot, ids_of
from clawq.transport.client import connect
from clawq.transport.codec import decode, encode
from clawq.transport.keys import RunKeys
from clawq.transport.memory import MemoryTransport
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsReader
from clawq.types import Fragment, Voided

Letters = list[tuple[Entry, str, str]]
Eventually = Callable[..., None]


class Fed:
    """A source that gives what the test feeds it: batches of entries, or errors to raise."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: deque[list[Entry] | Exception] = deque()
        self.reads = 0
        self.acknowledged: dict[str, str] = {}
        self.acknowledge_fails = False

    def feed(self, *batches: Sequence[Entry] | Exception) -> None:
        with self._changed:
            self._batches.extend(one if isinstance(one, Exception) else list(one) for one in batches)
            self._changed.notify_all()

    def read(self, timeout_s: float) -> list[Entry]:
        with self._changed:
            self.reads += 1
            self._changed.wait_for(lambda: self._batches, timeout_s)
            batch = self._batches.popleft() if self._batches else []
        if isinstance(batch, Exception):
            raise batch
        return batch

    def cursors(self) -> dict[str, str]:
        return {}

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        if self.acknowledge_fails:
            raise StoreFull("no memory")
        self.acknowledged.update(cursors)


def entry_of(fragment: Fragment) -> Entry:
    return Entry(fragment.meta.slot, fragment.meta.epoch, fragment.meta.seq, bytes(encode(fragment)))


def made(name: str = "s", steps: int = 3, envs: int = 2, seed: int = 0) -> Iterator[Fragment]:
    """Fragments of one slot, without end."""
    slot = TrueSlot(name, envs, np.random.default_rng(seed), count(1), chances=Chances(0.1, 0.1))
    while True:
        yield slot.fragment(steps)[0]


EXAMINER = Examiner(decode, FragmentCheck(SPEC, RUN))


@pytest.fixture
def fed() -> Fed:
    return Fed()


@pytest.fixture
def letters() -> Letters:
    return []


Make = Callable[..., Consumer]


@pytest.fixture
def consumer_of(fed: Fed, letters: Letters) -> Iterator[Make]:
    """Start consumers; closed at the end."""
    started: list[Consumer] = []

    def make(source: object = fed, max_lag: int | None = None, version: int = 0, **options: object) -> Consumer:
        def bury(entry: Entry, reason: str, detail: str) -> None:
            letters.append((entry, reason, detail))

        dead_letter = options.pop("dead_letter", bury)
        consumer = Consumer(
            source,  # type: ignore[arg-type]
            EXAMINER,
            StalenessRule(hard=max_lag),
            lambda: version,
            dead_letter,  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
        started.append(consumer)
        return consumer.start()

    yield make
    for one in started:
        one.close()
        assert one.check_valid() == (True, "")


def take_all(consumer: Consumer, fragments: int) -> list[Staged]:
    taken: list[Staged] = []
    while len(taken) < fragments:
        new = consumer.take(fragments - len(taken), timeout_s=5.0)
        assert new, f"only {len(taken)} of {fragments} fragments came"
        assert consumer.check_valid() == (True, "")
        taken += new
    return taken


def test_fragments_come_in_order_and_cursors_follow_the_commits(fed: Fed, consumer_of: Make) -> None:
    source = made()
    sent = [next(source) for _ in range(4)]
    fed.feed([entry_of(one) for one in sent])
    consumer = consumer_of()
    taken = take_all(consumer, 4)
    assert [one.id for one in taken] == ["1-1", "1-2", "1-3", "1-4"]
    np.testing.assert_array_equal(taken[2].fragment.obs["state"], sent[2].obs["state"])
    assert consumer.committed_cursors() == {}
    for k, one in enumerate(taken):
        consumer.commit(one)
        assert consumer.check_valid() == (True, "")
        assert consumer.committed_cursors() == {"s": f"1-{k + 1}"}
    assert consumer.marks == {"s": {1: 4}}
    counts = consumer.counts
    assert (counts.entries, counts.committed, counts.committed_steps) == (4, 4, 24)
    with pytest.raises(ValueError, match="committed before"):
        consumer.commit(taken[0])


def test_a_cursor_does_not_pass_a_fragment_that_is_not_committed(fed: Fed, consumer_of: Make) -> None:
    source = made()
    entries = [entry_of(next(source)) for _ in range(4)]
    broken = replace(entries[1], payload=b"garbage")
    fed.feed([entries[0], broken, *entries[2:]])
    consumer = consumer_of()
    first, third, fourth = take_all(consumer, 3)
    consumer.commit(fourth)
    assert consumer.committed_cursors() == {}
    consumer.commit(first)
    # The refused second entry needs no commit; the third is not in the ring.
    assert consumer.committed_cursors() == {"s": "1-2"}
    consumer.commit(third)
    assert consumer.committed_cursors() == {"s": "1-4"}


def test_every_kind_of_fault_is_counted_by_its_reason_and_kept_as_a_dead_letter(
    fed: Fed, consumer_of: Make, letters: Letters
) -> None:
    source = made(envs=3)
    good = [next(source) for _ in range(9)]
    nan, wild = good[4], good[5]
    nan.reward[nan.valid.nonzero()[0][0], nan.valid.nonzero()[1][0]] = np.nan
    wild.action[wild.valid] = 2.0
    entries = [
        entry_of(good[0]),
        replace(entry_of(good[1]), payload=entry_of(good[1]).payload[:-1]),
        entry_of(replace(good[2], meta=replace(good[2].meta, run="f" * 32))),
        entry_of(replace(good[3], meta=replace(good[3].meta, env="f" * 16))),
        entry_of(nan),
        entry_of(wild),
        replace(entry_of(good[6]), slot="t"),
        entry_of(replace(good[7], reward=good[7].reward, extras={}, obs={"state": good[7].obs["state"]},
                         final_obs={"state": good[7].final_obs["state"]})),
        entry_of(good[8]),
    ]  # fmt: skip
    fed.feed(entries)
    consumer = consumer_of()
    for one in take_all(consumer, 2):
        consumer.commit(one)
    expected = ["corrupt", "run", "env", "non_finite", "action_range", "identity", "schema"]
    assert consumer.counts.rejected == dict.fromkeys(expected, 1)
    assert [(entry, reason) for entry, reason, _ in letters] == list(zip(entries[1:8], expected, strict=True))
    assert all(detail for _, _, detail in letters)
    assert consumer.counts.entries == 9


def test_stale_fragments_are_counted_and_are_no_dead_letters(fed: Fed, consumer_of: Make, letters: Letters) -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1))
    fragments = [slot.fragment(2, weights_version=version)[0] for version in (1, 4, 5)]
    fed.feed([entry_of(one) for one in fragments])
    consumer = consumer_of(max_lag=3, version=7)
    taken = take_all(consumer, 2)
    assert [one.fragment.meta.weights_version for one in taken] == [4, 5]
    assert consumer.counts.rejected == {"stale": 1}
    assert letters == []


def test_what_a_refused_fragment_says_of_void_rows_reaches_the_ring_with_the_next_good_one(
    fed: Fed, consumer_of: Make
) -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    good = slot.fragment(3)[0]
    refused = [slot.fragment(3, voided=(Voided(1, 1, t),))[0] for t in (1, 2)]
    for one in refused:
        one.reward[0, 0] = np.nan
    last = slot.fragment(3, voided=(Voided(0, 1, 2),))[0]
    fed.feed([entry_of(one) for one in (good, *refused, last)])
    consumer = consumer_of()
    ring = ReplayRing(SPEC, 100)
    for staged in take_all(consumer, 2):
        ring.insert(staged.fragment)
        consumer.commit(staged)
        assert ring.check_valid() == (True, "")
    # Of the first fragment env 1 is void from t 1 on (the earlier of both notices), env 0 from t 2 on.
    assert ring.state.voided == 3
    assert ring.size == 6 - 3 + 6


def test_notices_of_an_older_epoch_are_not_laid_to_a_newer_one(fed: Fed, consumer_of: Make) -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    slot.fragment(3)
    refused = slot.fragment(3, voided=(Voided(1, 1, 0),))[0]
    refused.reward[0, 0] = np.nan
    slot.begin_epoch()
    fed.feed([entry_of(refused), *(entry_of(slot.fragment(3)[0]) for _ in range(2))])
    assert [one.fragment.meta.voided for one in take_all(consumer_of(), 2)] == [(), ()]


def test_C49_three_actors_and_every_fragment_delivered_twice_or_more_give_the_statistics_of_numpy(
    fed: Fed, consumer_of: Make
) -> None:
    ids, rng = count(1), np.random.default_rng(49)
    slots = [TrueSlot(f"host-w-{k}", 4, rng, ids) for k in range(3)]
    sent = [slots[k % 3].fragment(int(rng.integers(1, 6)), k)[0] for k in range(30)]
    entries = [entry_of(one) for one in sent]
    # Each batch begins again somewhere before its end, as after a cursor that was mirrored too late.
    for at in range(0, 30, 3):
        fed.feed(entries[max(0, at - 7) : at + 3])
    consumer = consumer_of()
    ring, rows = ReplayRing(SPEC, 2000), []
    for one in take_all(consumer, 30):
        ring.insert(one.fragment)
        consumer.commit(one)
        assert ring.check_valid() == (True, "")
        first, stop = ring.newest
        rows.append(ring.obs_at(torch.arange(first, stop))["state"].numpy()[one.fragment.valid.reshape(-1)])
    assert consumer.take(1) == []
    ours = np.concatenate(rows)
    truth = np.concatenate([one.obs["state"][:-1][one.valid] for one in sent])
    assert len(ours) == len(truth) == ring.size == ring.inserted
    np.testing.assert_allclose(ours.mean(0), truth.mean(0), rtol=1e-6)
    np.testing.assert_allclose(ours.var(0), truth.var(0), rtol=1e-6)
    assert len(set(ids_of(numpy_obs(ring)).tolist())) == ring.size
    assert consumer.counts.committed == 30
    assert consumer.counts.gap_fragments == 0


def numpy_obs(ring: ReplayRing) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    rows = torch.from_numpy(ring.sampleable_rows())
    return {key: one.numpy() for key, one in ring.obs_at(rows).items()}


def test_the_queue_is_bounded_by_bytes_and_actors_are_told_before_the_thread_waits(
    fed: Fed, consumer_of: Make, eventually: Eventually
) -> None:
    source = made()
    entries = [entry_of(next(source)) for _ in range(5)]
    bound = len(entries[0].payload) + len(entries[1].payload) + 1
    fed.feed(entries)
    consumer = consumer_of(staged_bytes=bound)
    eventually(lambda: consumer.state == "full", "the queue is full")
    assert consumer.staged == (2, bound - 1)
    assert fed.acknowledged == {"s": "1-2"}
    assert len(take_all(consumer, 5)) == 5
    eventually(lambda: fed.acknowledged == {"s": "1-5"}, "all is acknowledged")
    assert consumer.state == "reading"


def test_one_fragment_larger_than_the_bound_is_still_let_in(fed: Fed, consumer_of: Make) -> None:
    source = made()
    fed.feed([entry_of(next(source)) for _ in range(3)])
    assert len(take_all(consumer_of(staged_bytes=1), 3)) == 3


def test_a_redis_that_is_away_is_waited_out_and_told(fed: Fed, consumer_of: Make, eventually: Eventually) -> None:
    source = made()
    fed.feed([entry_of(next(source))], StoreUnavailable("data server gone"), StoreUnavailable("data server gone"))
    consumer = consumer_of()
    eventually(lambda: consumer.state == "waiting for Redis: data server gone", "the state says so")
    fed.feed([entry_of(next(source))])
    assert [one.id for one in take_all(consumer, 2)] == ["1-1", "1-2"]
    eventually(lambda: consumer.state == "reading", "it reads again")
    assert consumer.failure is None


def test_an_acknowledgement_that_failed_is_made_good_without_new_entries(
    fed: Fed, consumer_of: Make, eventually: Eventually
) -> None:
    fed.acknowledge_fails = True
    fed.feed([entry_of(next(made()))])
    consumer = consumer_of()
    eventually(lambda: consumer.state == "waiting for Redis: no memory", "the failure shows")
    fed.acknowledge_fails = False
    eventually(lambda: fed.acknowledged == {"s": "1-1"}, "it is said again")


def test_any_other_error_ends_the_thread_and_is_raised_by_take_after_what_was_staged(
    fed: Fed, consumer_of: Make, eventually: Eventually
) -> None:
    fed.feed([entry_of(next(made()))], RuntimeError("a bug"))
    consumer = consumer_of()
    eventually(lambda: consumer.failure, "the thread failed")
    assert consumer.state == "failed: RuntimeError: a bug"
    assert len(consumer.take(5)) == 1
    with pytest.raises(RuntimeError, match="a bug"):
        consumer.take(5, timeout_s=5.0)


def test_a_dead_letter_that_cannot_be_kept_is_counted_and_stops_nothing(fed: Fed, consumer_of: Make) -> None:
    def away(entry: Entry, reason: str, detail: str) -> None:
        raise StoreUnavailable("gone")

    source = made()
    bad = replace(entry_of(next(source)), payload=b"x")
    fed.feed([bad, entry_of(next(source))])
    consumer = consumer_of(dead_letter=away)
    take_all(consumer, 1)
    assert consumer.dead_letters_lost == 1
    assert consumer.counts.rejected == {"corrupt": 1}


def test_closing_is_quick_and_idempotent_even_when_the_queue_is_full(
    fed: Fed, consumer_of: Make, eventually: Eventually
) -> None:
    source = made()
    fed.feed([entry_of(next(source)) for _ in range(5)])
    consumer = consumer_of(staged_bytes=1)
    eventually(lambda: consumer.state == "full", "the queue is full")
    consumer.close()
    consumer.close()
    assert consumer.state == "stopped"
    assert [one.id for one in consumer.take(5, timeout_s=5.0)] == ["1-1"]
    # Nothing that was not committed is in what a checkpoint would hold.
    assert consumer.state_dict()["cursors"] == {}


def test_after_a_resume_the_cursors_of_the_checkpoint_are_mirrored_again(
    fed: Fed, consumer_of: Make, eventually: Eventually
) -> None:
    fed.feed([entry_of(next(made()))])
    first = consumer_of()
    first.commit(take_all(first, 1)[0])
    first.close()
    again = Fed()
    consumer_of(source=again, state=first.state_dict())
    # Else an actor whose window is full of what was taken over long ago would wait for ever.
    eventually(lambda: again.acknowledged == {"s": "1-1"}, "the mirror is right again")


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "", "", "bad"])), min_size=1, max_size=25),
    st.lists(st.integers(0, 6), max_size=8),
    st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_crashes_at_any_point_lose_nothing_and_commit_nothing_twice(
    sends: list[tuple[int, str]], crashes: list[int], seed: int
) -> None:
    """Staging and ledger without the thread: read on, crash after some commits, resume from the last checkpoint."""
    rng, ids = np.random.default_rng(seed), count(1)
    slots = [TrueSlot(f"s{k}", 1, rng, ids) for k in range(3)]
    log: list[tuple[Entry, Fragment | None]] = []
    for k, kind in sends:
        fragment = slots[k].fragment(1)[0]
        meta = fragment.meta
        entry = Entry(meta.slot, meta.epoch, meta.seq, b"12345")
        log.append((entry, None if kind == "bad" else fragment))
    good = [(entry.slot, entry.seq) for entry, fragment in log if fragment is not None]

    state: dict[str, Any] | None = None
    committed: list[tuple[str, int]] = []
    for commits in [*crashes, len(log)]:
        # What a crash leaves: the checkpoint's state and what was committed before it.
        staging, since = Staging(10**9, state), list(committed)
        done = {slot: int(cursor.split("-")[1]) for slot, cursor in staging.cursors.items()}
        for entry, found in log:
            if entry.seq <= done.get(entry.slot, 0):
                continue
            if found is not None:
                staging.put(entry, found)
            else:
                staging.drop(entry, "corrupt")
            assert staging.check_valid() == (True, "")
        for one in staging.take(commits, 0.0):
            staging.commit(one)
            since.append((one.entry.slot, one.entry.seq))
            assert staging.check_valid() == (True, "")
        if rng.random() < 0.5 or commits == len(log):  # else: crashed before the checkpoint was written
            state, committed = staging.state_dict(), since
    assert sorted(committed) == sorted(good)
    counts = Staging(1, state).counts
    assert (counts.committed, counts.rejected.get("corrupt", 0)) == (len(good), len(log) - len(good))


def test_a_ring_rebuilt_from_the_streams_holds_what_the_lost_one_held(consumer_of: Make) -> None:
    transport, ids, rng = MemoryTransport(), count(1), np.random.default_rng(7)
    slots = [TrueSlot(f"s{k}", 2, rng, ids) for k in range(2)]
    sinks = [transport.sink(slot.name) for slot in slots]
    for slot, sink in zip(slots, sinks, strict=True):
        slot.epoch = sink.epoch
    for k in range(20):
        slot, sink = slots[k % 2], sinks[k % 2]
        voided = (Voided(0, slot.seq, 1),) if k in (8, 9) else ()
        fragment = slot.fragment(3, voided=voided)[0]
        if k == 8:  # refused, but its notice counts
            fragment.action[:] = 3.0
        sink.send(fragment.meta.seq, encode(fragment))
    consumer = consumer_of(source=transport.source())
    ring = ReplayRing(SPEC, 1000)
    for one in take_all(consumer, 19):
        ring.insert(one.fragment)
        consumer.commit(one)
    rebuilt = ReplayRing(SPEC, 1000)
    layout = ring.layout()
    rebuild = Rebuild(rebuilt, layout, Traces.of(ring, layout))
    assert rebuild.put_back(transport.source().read_back(consumer.committed_cursors()), EXAMINER) == 19
    assert rebuild.finish() == []
    assert rebuilt.check_valid() == (True, "")
    assert set(ids_of(numpy_obs(rebuilt)).tolist()) == set(ids_of(numpy_obs(ring)).tolist())
    assert rebuilt.state.voided == ring.state.voided > 0


def test_over_a_real_redis_that_is_killed_and_comes_back_empty_the_consumer_goes_on(
    own_servers: EmbeddedRedis,
    restart_data: Callable[[EmbeddedRedis], None],
    consumer_of: Make,
    eventually: Eventually,
) -> None:
    keys = RunKeys(RUN)
    slot = TrueSlot("host-w-0", 2, np.random.default_rng(0), count(1))
    writing, reading = connect(own_servers.data_url), connect(own_servers.data_url)
    writer = StreamWriter.open(writing, keys, slot.name, "host/w")
    consumer = consumer_of(source=StreamReader(reading, keys, cursors=None))

    def send_two(writer: StreamWriter) -> None:
        slot.begin_epoch()
        slot.epoch = writer.epoch
        for _ in range(2):
            fragment = slot.fragment(3)[0]
            writer.send(fragment.meta.seq, encode(fragment))

    send_two(writer)
    for one in take_all(consumer, 2):
        consumer.commit(one)
    own_servers.processes[1].kill()
    eventually(lambda: consumer.state.startswith("waiting for Redis"), "the consumer notices")
    restart_data(own_servers)
    send_two(StreamWriter.open(writing, keys, slot.name, "host/w", after_epoch=writer.epoch))
    for one in take_all(consumer, 2):
        consumer.commit(one)
    counts = consumer.counts
    assert (counts.committed, counts.duplicates, counts.gap_fragments) == (4, 0, 0)
    writing.close()
    consumer.close()
    reading.close()


def again(fragment: Fragment, epoch: int, seq: int, life: int = 1) -> Fragment:
    """The same fragment as its actor sends it in another epoch: its counters go on over the actor's life."""
    return replace(fragment, meta=replace(fragment.meta, epoch=epoch, seq=seq, life=life))


def test_a_fragment_that_is_sent_again_under_a_new_epoch_is_taken_once(fed: Fed, consumer_of: Make) -> None:
    # Given an actor that did not learn that its second fragment had arrived, and whose claim had lapsed meanwhile
    source = made()
    first, second, third, fourth = (next(source) for _ in range(4))
    fed.feed([entry_of(first), entry_of(second), entry_of(again(second, 7, 1)), entry_of(again(third, 7, 2))])
    consumer = consumer_of()
    taken = take_all(consumer, 3)
    assert [staged.fragment.meta.produced for staged in taken] == [one.meta.produced for one in (first, second, third)]
    for staged in taken:
        consumer.commit(staged)
    counts = consumer.counts
    assert (counts.entries, counts.committed, counts.duplicates, counts.gap_fragments) == (4, 3, 1, 0)
    assert counts.produced_steps == counts.committed_steps == third.meta.produced
    assert counts.unaccounted_steps == 0
    assert consumer.committed_cursors() == {"s": "7-2"}
    # And the same over a resume
    state = consumer.state_dict()
    consumer.close()
    fed.feed([entry_of(again(third, 9, 1)), entry_of(again(fourth, 9, 2))])
    resumed = consumer_of(state=state)
    [staged] = take_all(resumed, 1)
    assert staged.fragment.meta.produced == fourth.meta.produced
    resumed.commit(staged)
    assert resumed.counts.duplicates == 2
    assert resumed.counts.unaccounted_steps == 0
    assert resumed.committed_cursors() == {"s": "9-2"}


def test_what_a_stalled_server_took_without_telling_the_actor_is_trained_on_once(
    own_servers: EmbeddedRedis, consumer_of: Make, eventually: Eventually
) -> None:
    # Given a real sender whose claim is short, and a server that stops longer than that
    keys, hasty, patient = RunKeys(RUN), connect(own_servers.data_url, timeout_s=0.3), connect(own_servers.data_url)
    epochs: list[int] = []

    def open_slot() -> StreamWriter:
        writer = StreamWriter.open(hasty, keys, "s", "w", 3.0, after_epoch=epochs[-1] if epochs else 0)
        epochs.append(writer.epoch)
        return writer

    outbox = Outbox(8, "block")
    sender = Sender(outbox, open_slot(), open_slot, encode, WeightsReader(hasty, keys))
    sender.start()
    sent = [fragment for _, fragment in zip(range(4), made(), strict=False)]
    server = own_servers.processes[1]
    try:
        outbox.put(sent[0], 1.0)
        assert sender.drain(5.0)
        # When the next fragment's XADD lies in the stopped server's socket buffer, and is executed in the end
        server.send_signal(signal.SIGSTOP)
        outbox.put(sent[1], 1.0)
        lapsed_s = time.monotonic() + 3.6
        eventually(lambda: time.monotonic() > lapsed_s, "the claim to run out")
    finally:
        server.send_signal(signal.SIGCONT)
    for fragment in sent[2:]:
        outbox.put(fragment, 1.0)
    assert sender.drain(10.0)
    sender.close()
    assert len(epochs) == 2
    # Then the learner takes each fragment once
    consumer = consumer_of(StreamReader(patient, keys))
    for staged in take_all(consumer, 4):
        consumer.commit(staged)
    eventually(lambda: consumer.counts.entries == patient.xlen(keys.stream("s")), "all entries")
    counts = consumer.counts
    assert counts.committed == 4
    assert counts.produced_steps == counts.committed_steps == sent[-1].meta.produced
    assert counts.unaccounted_steps == 0
    hasty.close()
    patient.close()


def test_a_new_actor_of_the_slot_counts_from_the_beginning_and_is_not_taken_for_an_old_one(
    fed: Fed, consumer_of: Make
) -> None:
    source = made()
    old = [next(source) for _ in range(3)]
    new = [again(one, 9, seq, life=9) for seq, one in enumerate(old, 1)]
    fed.feed([entry_of(one) for one in (*old, *new)])
    assert len(take_all(consumer_of(), 6)) == 6


def test_what_a_refused_fragment_said_of_void_rows_survives_a_checkpoint(
    consumer_of: Make, eventually: Eventually
) -> None:
    transport, rng = MemoryTransport(), np.random.default_rng(7)
    slot, sink = TrueSlot("s", 2, rng, count(1)), transport.sink("s")
    slot.epoch = sink.epoch

    def send(voided: tuple[Voided, ...] = (), spoilt: bool = False) -> None:
        fragment = slot.fragment(3, voided=voided)[0]
        if spoilt:
            fragment.action[:] = 3.0
        sink.send(fragment.meta.seq, encode(fragment))

    send()
    send((Voided(1, 1, 2),), spoilt=True)
    first = consumer_of(source=transport.source())
    (one,) = take_all(first, 1)
    assert one.inherited == ()
    first.commit(one)
    eventually(lambda: first.counts.entries == 2, "both are settled")
    state = first.state_dict()
    send()
    # Given a resumed consumer that never saw the refused fragment
    second = consumer_of(source=transport.source(state["cursors"]), state=state)
    (one,) = take_all(second, 1)
    assert one.inherited == one.fragment.meta.voided == (Voided(1, 1, 2),)
    second.commit(one)
    # Once it was handed on, it is not handed on again.
    assert second.state_dict()["notices"] == []
