"""Dead letters: exact counts, bounded bytes, and whole entries for as long as they fit."""

from typing import Any

from clawq.core import Entry
from clawq.transport import dead_letters as module
from clawq.transport.codec import MAX_FRAGMENT_BYTES
from clawq.transport.dead_letters import DeadLetters
from clawq.transport.keys import RunKeys


def test_dead_letters_keep_heads_and_exact_counts(data_client: Any, run_keys: RunKeys) -> None:
    letters = DeadLetters(data_client, run_keys)
    assert letters.counts() == {}
    assert letters.read() == []
    for seq in range(500):
        letters.append(Entry("a", 1, seq, bytes(100_000)), "corrupt" if seq % 2 else "wire_version", "x" * 5000)
    assert letters.counts() == {"corrupt": 250, "wire_version": 250}
    kept = letters.read()
    assert 200 <= len(kept) <= 300
    assert data_client.memory_usage(run_keys.dead_letters) < 3_000_000
    newest = kept[-1]
    assert (newest.slot, newest.epoch, newest.seq, newest.reason) == ("a", 1, 499, "corrupt")
    assert (newest.size_bytes, newest.head, newest.detail) == (100_000, bytes(4096), "x" * 1000)
    assert newest.made_ms > 1_600_000_000_000


def test_the_newest_entries_are_kept_whole_within_a_bound(data_client: Any, run_keys: RunKeys) -> None:
    small = Entry("a", 1, 1, b"short")
    DeadLetters(data_client, run_keys).append(small, "corrupt")
    for seq in range(2, 22):
        # Each by a learner of its own: what earlier ones kept counts too
        DeadLetters(data_client, run_keys).append(Entry("a", 1, seq, bytes([seq]) * 1_000_000), "corrupt")
    letters = DeadLetters(data_client, run_keys)
    kept = letters.read()
    payloads = [letters.payload(letter) for letter in kept]
    assert payloads[0] == small.payload
    assert payloads[1:13] == [None] * 12
    assert payloads[13:] == [bytes([seq]) * 1_000_000 for seq in range(14, 22)]
    assert data_client.memory_usage(run_keys.dead_entries) < 1.3 * module.WHOLE_BYTES


def test_an_entry_longer_than_any_fragment_is_cut(data_client: Any, run_keys: RunKeys) -> None:
    letters = DeadLetters(data_client, run_keys)
    letters.append(Entry("a", 1, 1, bytes(6_000_000)), "corrupt")
    [letter] = letters.read()
    assert letters.payload(letter) == bytes(MAX_FRAGMENT_BYTES + 1)


def test_garbage_among_the_letters_is_no_letter(data_client: Any, run_keys: RunKeys) -> None:
    data_client.xadd(run_keys.dead_letters, {"id": "no"})
    data_client.xadd(run_keys.dead_letters, {"x": "y"})
    DeadLetters(data_client, run_keys).append(Entry("a", 1, 1, b"x"), "corrupt")
    assert [letter.reason for letter in DeadLetters(data_client, run_keys).read()] == ["corrupt"]
