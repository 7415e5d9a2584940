"""Faults of what lies in Redis and on disks, and of clocks: F9, F11, F14, F15, F19, and entries that come twice."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from disks import fill

from chaos.redis_faults import pause, unharmed
from chaos.system import System
from clawq.errors import TransportError
from clawq.transport.codec import decode, encode
from clawq.transport.stream import PAYLOAD_FIELD
from clawq.types import Fragment

#: Slots of nobody, to which faults write.
INTRUDER, TWICE = "intruder", "twice"


def garbage_in_the_streams(system: System, dice: Random) -> str:
    """F9: entries of every kind that is not to be learned from."""
    good = _newest(system)
    nan, bad_reward = np.float32(np.nan), good.reward.copy()
    bad_reward[0, 0] = nan
    payload = bytearray(encode(_as(good, 1)))
    other_wire = bytearray(payload)
    other_wire[4] ^= 0x40
    flipped = bytes(payload[:-20]) + bytes([payload[-20] ^ 0xFF]) + bytes(payload[-19:])
    fakes: dict[str, list[Fragment]] = {
        "identity": [good],
        "run": [_as(good, 0, run="f" * 32)],
        "env": [_as(good, 0, env="0" * 16)],
        "schema": [replace(_as(good, 0), action=good.action[..., :1].copy())],
        # A dtype that no fragment has is no matter of the run's schema.
        "corrupt": [replace(_as(good, 0), reward=good.reward.astype(np.float64))],
        "non_finite": [replace(_as(good, 0), reward=bad_reward), replace(_as(good, 0), action=good.action * nan)],
        "action_range": [replace(_as(good, 0), action=good.action * 0 + np.float32(7.0))],
    }
    raw = [b"", dice.randbytes(100), bytes(payload[:-50]), flipped, b"\xff" * 1000, bytes(8_000_000)]
    entries: list[tuple[str, bytes]] = [("corrupt", one) for one in raw] + [("wire_version", bytes(other_wire))]
    seq = len(entries)
    for reason, fragments in fakes.items():
        for fragment in fragments:
            seq += 1
            fixed = fragment if reason == "identity" else replace(fragment, meta=replace(fragment.meta, seq=seq))
            entries.append((reason, bytes(encode(fixed))))
    before = _rejected(system)
    _intrude(system, INTRUDER, [one for _, one in entries])
    system.over()
    wanted = {reason: sum(1 for one, _ in entries if one == reason) for reason, _ in entries}

    def told() -> bool:
        return {name: _rejected(system).get(name, 0) - before.get(name, 0) for name in wanted} == wanted

    system.until(told, f"each of these to be refused with its reason: {wanted}", 15.0)
    return f"{len(entries)} entries refused, each with its own reason"


def entries_again(system: System, dice: Random) -> str:
    """F8: fragments delivered out of order, and again under a new epoch; each counts once."""
    stream, good = system.keys.stream(TWICE), _newest(system)
    before = system.check_ledger().sums
    # A life of its own, which is a slot's: a fragment that was sent under one epoch, then again under the next.
    made = good.meta.steps * good.meta.envs
    life = [_as(good, seq, slot=TWICE, produced=seq * made) for seq in range(1, 6)]
    _intrude(system, TWICE, [bytes(encode(one)) for one in life])
    for seq in (2, 1):
        try:
            system.data.ask("XADD", stream, f"1-{seq}", PAYLOAD_FIELD, bytes(encode(life[seq - 1])))
        except TransportError:
            continue
        raise AssertionError("Redis took an entry out of order")
    again = [replace(one, meta=replace(one.meta, epoch=2)) for one in life]
    dice.shuffle(again)
    again = [replace(one, meta=replace(one.meta, seq=seq)) for seq, one in enumerate(again, 1)]
    _intrude(system, TWICE, [bytes(encode(one)) for one in again], epoch=2)
    system.over()
    known = before["duplicates"] + len(again)
    system.until(lambda: system.balance().sums["duplicates"] == known, "the five to be known again", 15.0)
    return "5 sent, 5 sent again in another order under a new epoch and known again"


def weights_damaged(system: System, dice: Random) -> str:
    """F11: the newest weights are flipped, truncated, taken away, and the head set back and to nowhere."""
    deeds: list[Callable[[str, int], Any]] = [
        lambda key, head: system.data.ask("HSET", key, "c0", dice.randbytes(64)),
        lambda key, head: system.data.ask("HSET", key, "c0", b""),
        lambda key, head: system.data.ask("HDEL", key, "c0"),
        lambda key, head: system.data.ask("HSET", key, "meta", b"{"),
        lambda key, head: system.data.ask("DEL", key),
        lambda key, head: system.data.ask("HSET", system.keys.control, "head", head - 1),
        lambda key, head: system.data.ask("HSET", system.keys.control, "head", head + 5),
        lambda key, head: system.data.ask("HSET", system.keys.control, "head", "x"),
    ]
    with unharmed(system):
        for deed in deeds:
            head = int(system.client.hget(system.keys.control, "head"))
            deed(system.keys.weights(head), head)
            # Long enough for actors to meet it.
            pause(0.4)
        system.over()
        since = system.mark()
        system.await_recovery(since)
        versions = _versions(system)
        system.until(lambda: min(_versions(system)) > max(versions), "actors to act with newer weights")
    return f"{len(deeds)} kinds of damage"


def disk_full_of_checkpoints(system: System, dice: Random) -> str:
    """F14: the learner's disk is full, then it is not any more."""
    folder = system.run_folder / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.glob("*.ckpt")}
    with unharmed(system):
        ballast = fill(system.home.runs)
        system.until(lambda: "was not written" in system.learner.output, "the failure to be told")
        kept = [name for name in before if (folder / name).exists()]
        since = system.mark()
        system.await_recovery(since)
        assert any((folder / path).read_bytes() == before[path] for path in kept) or list(folder.glob("*.ckpt"))
        full = {path.name for path in folder.glob("*.ckpt")}
        ballast.unlink()
        system.over()
        system.until(lambda: {path.name for path in folder.glob("*.ckpt")} - full, "the next checkpoint")
    return f"{len(kept)} of {len(before)} checkpoints were kept, training went on meanwhile"


def disk_full_of_redis(name: str, seconds: float) -> Callable[[System, Random], str]:
    """F14: a server cannot write its append-only file, and refuses all writes (MISCONF)."""

    def inject(system: System, dice: Random) -> str:
        server = {"data": system.data, "broker": system.broker}[name]
        ballast = fill(system.folder / name)

        def refuses() -> bool:
            try:
                server.ask("SET", "chaos:probe", bytes(8192), "EX", "1")
            except TransportError as error:
                return "MISCONF" in str(error)
            return False

        system.until(refuses, "the server to refuse writes")
        pause(seconds)
        ballast.unlink()
        system.until(lambda: not refuses(), "the server to take writes again")
        system.over()
        return f"refused all writes for {seconds:.0f} s and more"

    return inject


def checkpoint_damaged(system: System, dice: Random) -> str:
    """F19: the newest checkpoint is damaged, the one before it too, each in another way."""
    folder = system.run_folder / "checkpoints"
    system.until(lambda: len(list(folder.glob("*.ckpt"))) >= 3, "three checkpoints")
    system.learner.process.send_signal(signal.SIGKILL)
    system.learner.wait(5.0)
    newest = sorted(folder.glob("*.ckpt"))[:-3:-1]
    kinds = dice.sample(("one bit", "truncated", "empty"), 2)
    for path, kind in zip(newest, kinds, strict=True):
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes({"one bit": bytes(content), "truncated": bytes(content[:-100]), "empty": b""}[kind])
    system.over()
    learner = system.resume()
    system.until(lambda: all(path.name in learner.output for path in newest), "both to be told of", 60.0)
    return f"{' and '.join(kinds)}: both told, went on from the third"


def wrong_clocks(system: System, dice: Random) -> str:
    """F15: as the setup says, one worker is ahead by 15 minutes and one behind; nobody is ended, no slot is doubled."""
    before = system.mark()
    with unharmed(system):
        # Longer than any claim lasts.
        pause(15.0)
        now = system.mark()
    epochs = {slot: (before.streams[slot][0], now.streams[slot][0]) for slot in before.streams}
    assert all(old == new for old, new in epochs.values()), f"claims were lost: {epochs}"
    assert len(now.streams) == len(system.workers), f"slots: {sorted(now.streams)}"
    return f"{now.committed - before.committed} fragments meanwhile, no claim lost"


def clock_set(seconds: int) -> Callable[[System, Random], str]:
    """F15: the clock of the data server's host is set, while all runs."""

    def inject(system: System, dice: Random) -> str:
        before = system.mark()
        with unharmed(system):
            system.ground.set_clock(seconds)
            system.until(lambda: abs(_ahead_s(system) - seconds) < 30, "the server's clock to be set")
            system.over()
            system.await_recovery(system.mark())
            # Longer than any claim lasts.
            pause(12.0)
            system.await_recovery(system.mark())
        now = system.mark()
        anew = sum(now.streams[slot][0] != before.streams[slot][0] for slot in before.streams if slot in now.streams)
        return f"{anew} slots began a new epoch"

    return inject


def _ahead_s(system: System) -> float:
    """How far the data server's clock is ahead of ours."""
    seconds, micros = system.data.ask("TIME")
    return float(int(seconds) + int(micros) / 1e6 - time.time())


# --- what they share -------------------------------------------------------------------------------------------------


def _newest(system: System) -> Fragment:
    """The newest fragment of some slot."""
    for slot in sorted(system.mark().streams):
        entries = system.client.xrevrange(system.keys.stream(slot), count=1)
        if slot not in (INTRUDER, TWICE) and entries:
            return decode(entries[0][1][PAYLOAD_FIELD])
    raise AssertionError("there is no fragment in any stream")


def _as(fragment: Fragment, seq: int, **changes: object) -> Fragment:
    """As if the intruder had made it."""
    own: dict[str, Any] = {"slot": INTRUDER, "epoch": 1, "life": 1, "seq": seq, "voided": (), "dropped": {}}
    return replace(fragment, meta=replace(fragment.meta, **(own | changes)))


def _intrude(system: System, slot: str, payloads: list[bytes], epoch: int = 1) -> None:
    """Write them to a stream of their own, as a slot's writer would."""
    registration = {"worker": "nobody", "epoch": epoch, "born": 1}
    system.client.hset(system.keys.slots, slot, json.dumps(registration))
    for seq, payload in enumerate(payloads, 1):
        system.data.ask("XADD", system.keys.stream(slot), f"{epoch}-{seq}", PAYLOAD_FIELD, payload)


def _rejected(system: System) -> dict[str, int]:
    found: dict[str, int] = system.balance().sums["rejected"]
    return found


def _versions(system: System) -> list[int]:
    """Of the weights that the newest fragment of each slot was made with."""
    found = []
    for slot in system.mark().streams:
        entries = system.client.xrevrange(system.keys.stream(slot), count=1)
        found += [decode(entries[0][1][PAYLOAD_FIELD]).meta.weights_version] if entries else []
    return found
