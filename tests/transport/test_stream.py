"""The writing end against faults of every kind: stalls, restarts, garbage, full memory, lost claims."""

import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis

from clawq.core import Entry
from clawq.errors import ClaimHeld, ClaimLost, CorruptFragment, StoreFull, StoreUnavailable, StreamRejected
from clawq.testing.experience import TrueSlot
from clawq.transport.client import connect
from clawq.transport.codec import decode, encode
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter, last_generated, parse_id

Restart = Callable[[EmbeddedRedis], None]


def drain(reader: StreamReader, count: int, deadline_s: float = 10.0) -> list[Entry]:
    entries: list[Entry] = []
    deadline = time.monotonic() + deadline_s
    while len(entries) < count:
        assert time.monotonic() < deadline, f"only {len(entries)} of {count} entries came"
        entries += reader.read(0.2)
    return entries


def test_a_new_epoch_is_server_time_or_above_whatever_the_stream_has_seen(data_client: Any, run_keys: RunKeys) -> None:
    seconds, _ = data_client.time()
    first = StreamWriter.open(data_client, run_keys, "a", "w")
    assert 0 <= first.epoch - int(seconds) * 1000 < 10_000
    first.close()
    data_client.xadd(run_keys.stream("a"), {"f": b"x"}, id="9000000000000-7")
    # Deleting the entries does not make the ids usable again.
    data_client.xtrim(run_keys.stream("a"), maxlen=0, approximate=False)
    assert last_generated(data_client, run_keys.stream("a")) == (9000000000000, 7)
    second = StreamWriter.open(data_client, run_keys, "a", "w")
    assert second.epoch == 9000000000001
    second.send(1, b"y")
    assert last_generated(data_client, run_keys.stream("none")) is None


def test_opening_registers_who_writes_the_slot(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "host-a worker-1")
    text = data_client.hget(run_keys.slots, "a").decode()
    assert "host-a worker-1" in text
    assert str(writer.epoch) in text
    with pytest.raises(ClaimHeld, match="host-a worker-1"):
        StreamWriter.open(data_client, run_keys, "a", "host-b")


def test_a_server_stopped_in_the_middle_of_a_send_gets_the_entry_exactly_once(
    own_servers: EmbeddedRedis, run_keys: RunKeys
) -> None:
    client, patient = connect(own_servers.data_url, timeout_s=0.2), connect(own_servers.data_url)
    writer = StreamWriter.open(client, run_keys, "a", "w")
    server = own_servers.processes[1]
    for seq in range(1, 6):
        server.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                # The command lies in the stopped server's socket buffer: it may be executed later, or not.
                with pytest.raises(StoreUnavailable, match="did not answer in time"):
                    writer.send(seq, b"%d" % seq)
        finally:
            server.send_signal(signal.SIGCONT)
        patient.ping()
        writer.send(seq, b"%d" % seq)
    reader = StreamReader(patient, run_keys)
    assert [(entry.seq, entry.payload) for entry in drain(reader, 5)] == [(n, b"%d" % n) for n in range(1, 6)]
    assert patient.xlen(run_keys.stream("a")) == 5
    assert writer.unread_bytes() == 5
    client.close()
    patient.close()


def test_C14_half_a_command_of_a_killed_actor_makes_no_entry(data_client: Any, run_keys: RunKeys) -> None:
    path = data_client.connection_pool.connection_kwargs["path"]
    stream = run_keys.stream("a").encode()
    whole = b"*5\r\n$4\r\nXADD\r\n$%d\r\n%s\r\n$3\r\n1-1\r\n$1\r\nf\r\n$100000\r\n" % (len(stream), stream)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(whole + bytes(50_000))
    data_client.ping()
    assert not data_client.exists(run_keys.stream("a"))
    StreamWriter.open(data_client, run_keys, "a", "w").send(1, b"x")


def test_an_entry_of_an_older_incarnation_that_arrives_late_is_refused(data_client: Any, run_keys: RunKeys) -> None:
    old = StreamWriter.open(data_client, run_keys, "a", "old")
    old.send(1, b"x")
    data_client.delete(run_keys.claim("slot:a"))  # it ran out while the old one was stopped
    new = StreamWriter.open(data_client, run_keys, "a", "new")
    new.send(1, b"y")
    with pytest.raises(ClaimLost, match="taken over by new"):
        old.send(2, b"late")
    assert [entry.payload for entry in drain(StreamReader(data_client, run_keys), 2)] == [b"x", b"y"]
    old.close()
    with pytest.raises(ClaimHeld):
        StreamWriter.open(data_client, run_keys, "a", "third")


def test_a_claim_is_renewed_by_sending_and_by_polling(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w", claim_ttl_s=0.3)
    deadline = time.monotonic() + 0.9
    for seq in itertools.count(1):
        writer.send(seq, b"x") if seq % 2 else writer.poll()
        assert data_client.exists(run_keys.claim("slot:a"))
        if time.monotonic() > deadline:
            return


def test_a_lapsed_claim_begins_a_new_epoch_instead_of_going_on(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w", claim_ttl_s=0.05)
    time.sleep(0.1)  # this process is stopped for longer than the claim's limit
    with pytest.raises(StreamRejected, match="lapsed"):
        writer.poll()
    for act in (writer.poll, lambda: writer.send(1, b"x")):
        with pytest.raises(StreamRejected, match="closed"):
            act()
    assert not data_client.exists(run_keys.stream("a"))
    again = StreamWriter.open(data_client, run_keys, "a", "w", after_epoch=writer.epoch)
    again.send(1, b"x")


def test_garbage_in_a_stream_is_told_apart_and_the_writer_recovers_with_a_new_epoch(
    data_client: Any, run_keys: RunKeys
) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    fragment, _ = TrueSlot("a", 2, np.random.default_rng(0), itertools.count()).fragment(3)
    writer.send(1, encode(fragment))
    for garbage in ({"nonsense": b"x"}, {"f": b""}, {"f": bytes(1000)}, {"f": encode(fragment)[:-1]}):
        data_client.xadd(run_keys.stream("a"), garbage, id="*")
    with pytest.raises(StreamRejected, match="not there"):
        writer.send(2, encode(fragment))
    again = StreamWriter.open(data_client, run_keys, "a", "w", after_epoch=writer.epoch)
    again.send(1, encode(fragment))
    entries = drain(StreamReader(data_client, run_keys), 6)
    decode(entries[0].payload)
    decode(entries[-1].payload)
    for entry in entries[1:-1]:
        with pytest.raises(CorruptFragment):
            decode(entry.payload)


def test_garbage_where_slots_are_registered_does_not_stop_the_reader(data_client: Any, run_keys: RunKeys) -> None:
    data_client.hset(run_keys.slots, mapping={b"\xff": "{}", "bad json": "{", "a b": '{"epoch": 1}', "list": "[]"})
    StreamWriter.open(data_client, run_keys, "a", "w").send(1, b"x")
    assert drain(StreamReader(data_client, run_keys), 1)[0].slot == "a"


def test_an_empty_server_after_a_restart_is_noticed_and_new_epochs_are_read(
    own_servers: EmbeddedRedis, restart_data: Restart, run_keys: RunKeys
) -> None:
    """Server-issued epochs lost 14 511 of 37 858 fragments here. The clock runs back too: the old epoch is ahead."""
    client = connect(own_servers.data_url)
    old = StreamWriter.open(client, run_keys, "a", "w", after_epoch=9_000_000_000_000)
    kept = StreamWriter.open(client, run_keys, "kept", "w")
    for seq in range(1, 4):
        old.send(seq, b"old%d" % seq)
        kept.send(seq, b"k%d" % seq)
    reader = StreamReader(client, run_keys)
    drain(reader, 6)
    assert not reader.server_changed()
    restart_data(own_servers)
    with pytest.raises(StreamRejected, match="lapsed"):
        _force_renewal(old)
    new = StreamWriter.open(client, run_keys, "a", "w")
    assert new.epoch < old.epoch
    with pytest.raises(StreamRejected, match="lapsed"):
        _force_renewal(kept)
    later = StreamWriter.open(client, run_keys, "kept", "w", after_epoch=kept.epoch)
    new.send(1, b"new1")
    later.send(1, b"later1")
    got = {(entry.slot, entry.epoch, entry.seq): entry.payload for entry in drain(reader, 2)}
    assert got == {("a", new.epoch, 1): b"new1", ("kept", later.epoch, 1): b"later1"}
    assert reader.server_changed()
    assert not reader.server_changed(), "it is told once"
    assert reader.cursors() == {"a": f"{new.epoch}-1", "kept": f"{later.epoch}-1"}
    assert reader.stored_bytes() <= len(b"new1later1k1k2k3")
    client.close()


def _force_renewal(writer: StreamWriter) -> None:
    """Poll until the renewal is due, over a connection that the restart broke."""
    deadline = time.monotonic() + 10.0
    writer._claim.ttl_s = 0.01
    while time.monotonic() < deadline:
        try:
            writer.poll()
        except StoreUnavailable:
            continue


def test_C58_full_memory_pauses_the_writer_and_trimming_lets_it_go_on_with_nothing_lost(
    own_servers: EmbeddedRedis, run_keys: RunKeys
) -> None:
    writing, reading = connect(own_servers.data_url), connect(own_servers.data_url)
    writer = StreamWriter.open(writing, run_keys, "a", "w")
    ControlRecord(reading, run_keys).write(window_bytes=1, config_epoch=1)
    reader = StreamReader(reading, run_keys)
    full, last = threading.Event(), 120

    def flood() -> None:
        for seq in range(1, last + 1):
            while True:
                try:
                    writer.send(seq, seq.to_bytes(4, "big") * 250_000)
                    break
                except StoreFull:
                    full.set()
                    time.sleep(0.01)  # back off, as the outbox does

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert full.wait(30.0), "120 MB never filled 32 MB"
        assert not reader.trim({"a": f"{writer.epoch}-{last}"}, 0), "what was never read is not trimmed"
        seqs: list[int] = []
        while len(seqs) < last:
            entries = reader.read(5.0)
            assert entries, f"the flow stopped after {len(seqs)}"
            assert all(entry.payload == entry.seq.to_bytes(4, "big") * 250_000 for entry in entries)
            seqs += [entry.seq for entry in entries]
            reader.trim(reader.cursors(), 1_000_000)
    finally:
        thread.join(30.0)
    assert seqs == list(range(1, last + 1))
    writing.close()
    reading.close()


def test_a_server_that_went_away_is_unavailable_and_closing_does_not_fail(
    own_servers: EmbeddedRedis, run_keys: RunKeys
) -> None:
    client = connect(own_servers.data_url)
    writer = StreamWriter.open(client, run_keys, "a", "w")
    own_servers.processes[1].kill()
    own_servers.processes[1].wait()
    for act in (writer.poll, lambda: writer.send(1, b"x"), lambda: StreamReader(client, run_keys).read(0.1)):
        with pytest.raises(StoreUnavailable):
            act()
    writer.close()
    client.close()


def test_ids_compare_as_numbers() -> None:
    assert parse_id("9-10") == (9, 10) > parse_id("9-9") > parse_id("8-11")
    assert parse_id("5") == (5, 0)


def test_one_send_is_one_round_trip(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    writer.send(1, b"x")
    before = data_client.info("stats")["total_net_input_bytes"], data_client.info("commandstats")
    for seq in range(2, 12):
        writer.send(seq, b"x")
    after = data_client.info("commandstats")
    calls = {
        name: stats["calls"] - before[1].get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
        if name != "cmdstat_info"
    }
    assert {name: count for name, count in calls.items() if count} == {
        "cmdstat_xadd": 10, "cmdstat_hmget": 10, "cmdstat_hget": 10,
    }  # fmt: skip
    assert isinstance(data_client, redis.Redis)
