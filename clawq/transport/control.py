"""The small records of a run: control record, registry of runs, events, metrics board, heartbeats, dead letters.

Each class is one key (or two) with its own words; values are JSON. Every write is one command or one MULTI, so a crash
between any two lines leaves either the old record or the new one. Everything has a bound: streams are trimmed by
length, heartbeats expire, dead letters keep only the head of an entry.

What it does not do: decide anything. Who is alive, what to start and when to stop is for clawq.control and the learner.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from clawq.core import Control
from clawq.json_text import is_whole, parse_json, parse_object
from clawq.transport.claims import Claim, watched
from clawq.transport.client import socket_timeout_s, translated
from clawq.transport.keys import RUNS_KEY, RunKeys, check_name
from clawq.transport.signing import CONTROL_FIELDS, WRITTEN_FIELDS, ControlSeal
from clawq.transport.texts import parse_whole, readable

#: Events and orders kept per run (approximately).
_EVENTS_KEPT, _ORDERS_KEPT = 10_000, 1_000
_PAGE = 1000
#: What people tell a run's learner to do (clawq.programs.inbox).
ORDERS = frozenset({"stop_wanted", "tune_wanted", "tune_withdrawn", "quarantine_wanted"})
#: How long a finished run's control record still says stop, seconds.
_TOMBSTONE_S = 600
#: A worker that was silent for so long is forgotten.
HEARTBEAT_TTL_S = 30.0
#: Numbers in a heartbeat stay below this.
_LARGEST = 2**53


class ControlRecord:
    """What the learner tells all actors of a run; sealed where this host has a key (clawq.transport.signing).

    Args:
        client: of the data server.
        keys: of the run.
        claim: if given, writes happen only while it is held (ClaimLost otherwise).
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, claim: Claim | None = None) -> None:
        self._client: Any = client
        self._key, self._claim = keys.control, claim
        self._seal = ControlSeal(keys.tag)

    def write(self, **fields: int | bool) -> None:
        """Set some of `stop`, `window_bytes`, `config_epoch`, `head`; the others keep their values."""
        unknown = set(fields) - set(WRITTEN_FIELDS)
        if unknown:
            raise TypeError(f"the control record has no field {', '.join(sorted(unknown))}; it has {WRITTEN_FIELDS}")
        changes = {name: int(value) for name, value in fields.items()}

        def once(pipe: Any) -> bool:
            if self._claim is not None:
                self._claim.verify_in(pipe)
            mapping = self._seal.sealed(pipe.hmget(self._key, CONTROL_FIELDS), changes)
            pipe.multi()
            pipe.hset(self._key, mapping=mapping)
            pipe.execute()
            return True

        watched(self._client, (self._key,), once)

    def read(self) -> Control | None:
        """The record, None if there is none (then actors wait)."""
        with translated(self._client):
            return self._seal.parse(self._client.hmget(self._key, CONTROL_FIELDS))

    def request_stop(self) -> None:
        """Tell all actors that the run is over. Needs no claim: whoever may write the record may stop the run."""
        unclaimed, self._claim = self._claim, None
        try:
            self.write(stop=True)
        finally:
            self._claim = unclaimed


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as workers and the command line see it.

    Attributes:
        run_id: name and start time; also the name of its queue.
        tag: 32 hex digits, under which its keys stand.
        config: the RunConfig as JSON.
        spec: the EnvSpec as JSON.
        state: `starting`, `running`, `stopping`, `done` or `failed`.
        created_ms: wall clock of the learner's host.
        learner: host and pid, for people.
    """

    run_id: str
    tag: str
    config: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"
    created_ms: int = 0
    learner: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> RunKeys:
        """Its keys on the data server."""
        return RunKeys(self.tag)

    @property
    def learner_text(self) -> str:
        """Its learner, in words."""
        return f"learner {self.run_id} on {self.learner.get('host', '?')}, pid {self.learner.get('pid', '?')}"

    def same_session(self, other: "RunRecord") -> bool:
        """Whether the same session of the same learner wrote both; another one has taken the run over otherwise."""
        return (self.tag, self.created_ms, self.learner) == (other.tag, other.created_ms, other.learner)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RunRecord":
        """Inverse of `to_json`; fields of newer versions are ignored. ValueError for what is no run."""
        run = cls(**{"run_id": "", "tag": "", **{name: raw[name] for name in cls.__dataclass_fields__ if name in raw}})
        words, sections = (run.run_id, run.tag, run.state), (run.config, run.spec, run.learner)
        if not all(isinstance(word, str) for word in words) or not all(isinstance(one, dict) for one in sections):
            raise ValueError("a field of a run's record is of another type")
        if not is_whole(run.created_ms):
            raise ValueError("a run's record without a time")
        # Both become parts of keys.
        check_name(run.run_id)
        RunKeys(run.tag)
        return run


class RunRegistry:
    """The runs that exist, on the broker."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client

    def add(self, record: RunRecord) -> None:
        """Write or replace a run."""
        with translated(self._client):
            self._client.hset(RUNS_KEY, record.run_id, json.dumps(record.to_json()))

    def get(self, run_id: str) -> RunRecord | None:
        """That run, None if there is none."""
        with translated(self._client):
            text = self._client.hget(RUNS_KEY, run_id)
        return _run_record(text)

    def list(self) -> list[RunRecord]:
        """All runs, oldest first."""
        with translated(self._client):
            texts = self._client.hvals(RUNS_KEY)
        return sorted(filter(None, map(_run_record, texts)), key=lambda run: run.created_ms)

    def remove(self, run_id: str) -> None:
        """Forget a run; nothing happens if there is none."""
        with translated(self._client):
            self._client.hdel(RUNS_KEY, run_id)

    def withdraw(self, record: RunRecord) -> bool:
        """Remove the entry of this session; returns False, and leaves it, if another session has written its own."""

        def once(pipe: Any) -> bool:
            entry = _run_record(pipe.hget(RUNS_KEY, record.run_id))
            if entry is None or not entry.same_session(record):
                return False
            pipe.multi()
            pipe.hdel(RUNS_KEY, record.run_id)
            pipe.execute()
            return True

        return watched(self._client, (RUNS_KEY,), once)


def _run_record(text: bytes | None) -> RunRecord | None:
    """The record, None if that is none of ours: one garbled entry must not hide the others."""
    try:
        return None if text is None else RunRecord.from_json(parse_object(text))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run.

    Attributes:
        id: of the stream entry; larger is later.
        kind: a short name, as `lease_done`.
        facts: JSON-able facts.
    """

    id: str
    kind: str
    facts: dict[str, Any]


class Events:
    """What happened in a run: a bounded stream that anybody appends to. An order found in it is none."""

    _kept = _EVENTS_KEPT

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._key = self._stream(keys)

    def _stream(self, keys: RunKeys) -> str:
        return keys.events

    def _takes(self, kind: str) -> bool:
        return kind not in ORDERS

    def append(self, kind: str, **facts: Any) -> str:
        """Add an event; returns its id. An unclear failure may have added it: events are reports, not commands."""
        fields: Any = {"kind": kind, "facts": json.dumps(facts, default=str)}
        with translated(self._client):
            entry_id = self._client.xadd(self._key, fields, maxlen=self._kept, approximate=True)
        return bytes(entry_id).decode()

    def read(self, after_id: str = "0-0", timeout_s: float = 0.0) -> list[Event]:
        """Up to 1000 events after that id, oldest first; waits at most `timeout_s` for the first one."""
        block_ms = _block_ms(self._client, timeout_s)
        while True:
            with translated(self._client):
                answer = self._client.xread({self._key: after_id}, count=_PAGE, block=block_ms)
            entries = [entry for _, page in answer or [] for entry in page]
            events = (_event(entry_id, fields) for entry_id, fields in entries)
            found = [event for event in events if event is not None and self._takes(event.kind)]
            if found or len(entries) < _PAGE:
                return found
            # A page of what is none of ours must not hide what comes after it.
            after_id, block_ms = bytes(entries[-1][0]).decode(), None

    def last(self, count: int) -> list[Event]:
        """The newest events, oldest first."""
        with translated(self._client):
            entries = self._client.xrevrange(self._key, count=count)
        events = (_event(entry_id, fields) for entry_id, fields in reversed(entries))
        return [event for event in events if event is not None]

    def newest_id(self) -> str:
        """Id of the newest event, `0-0` if there is none; reading after it shows only what comes later."""
        with translated(self._client):
            newest = self._client.xrevrange(self._key, count=1)
        return bytes(newest[0][0]).decode() if newest else "0-0"


class Orders(Events):
    """What people tell a run's learner to do. A stream of its own, since workers may append to the run's events."""

    _kept = _ORDERS_KEPT

    def _stream(self, keys: RunKeys) -> str:
        return keys.orders

    def _takes(self, kind: str) -> bool:
        return kind in ORDERS


def _event(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event | None:
    try:
        return Event(entry_id.decode(), fields[b"kind"].decode(), parse_object(fields[b"facts"]))
    except (KeyError, ValueError):
        return None  # somebody else wrote into the stream


def _block_ms(client: redis.Redis, timeout_s: float) -> int | None:
    """BLOCK argument: None = do not wait; well below the socket timeout, or the wait would look like a dead server."""
    if timeout_s <= 0:
        return None
    return max(1, int(1000 * min(timeout_s, 2.0, 0.4 * socket_timeout_s(client))))


class Board:
    """The newest numbers of a run, for the screen."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._key, self._reaped = keys.metrics, keys.reaped

    def write(self, metrics: Mapping[str, float | str]) -> None:
        """Set these; others keep their values."""
        if metrics:
            with translated(self._client):
                self._client.hset(self._key, mapping={name: json.dumps(value) for name, value in metrics.items()})

    def pick(self, names: Sequence[str]) -> dict[str, float | str]:
        """Those of these that are there and can be read."""
        with translated(self._client):
            raw = self._client.hmget(self._key, list(names))
        there = {name.encode(): value for name, value in zip(names, raw, strict=True) if value is not None}
        return readable(there, _board_value)

    def count_reaped(self, reason: str) -> None:
        """A watchdog ended a process of the run. A key of its own: workers, as whom it acts, may not write the rest."""
        with translated(self._client):
            self._client.hincrby(self._reaped, reason, 1)

    def read(self) -> dict[str, float | str]:
        """All numbers and texts by name, `workers_reaped_total/<reason>` among them; what is neither is left out."""
        with translated(self._client):
            pipe = self._client.pipeline(transaction=False)
            pipe.hgetall(self._key)
            pipe.hgetall(self._reaped)
            raw, reaped = pipe.execute()
        counts = {b"workers_reaped_total/" + reason: count for reason, count in reaped.items()}
        return readable({**raw, **counts}, _board_value)


def _board_value(text: bytes) -> float | str:
    value = parse_json(text)
    if isinstance(value, str | float) or is_whole(abs(value) if isinstance(value, int) else value):
        return value  # type: ignore[no-any-return]
    raise ValueError("neither a number nor a text")


class PaceRecord:
    """What the coordinator decided about pace, handed to the learner, which alone writes the control record.

    Fenced by the session: what the coordinator of another session of the run left here counts for nothing.

    Args:
        client: of the data server.
        keys: of the run.
        session: of the learner; its record's `created_ms`.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, session: int) -> None:
        self._client: Any = client
        self._key, self._session = keys.pace, session

    def write(self, window_bytes: int) -> None:
        """Decide the window."""
        with translated(self._client):
            self._client.hset(self._key, mapping={"session": self._session, "window_bytes": window_bytes})

    def read(self) -> int | None:
        """The window that this session's coordinator decided, None if it did not (yet)."""
        with translated(self._client):
            session, window_bytes = self._client.hmget(self._key, ("session", "window_bytes"))
        try:
            return max(1, parse_whole(window_bytes)) if parse_whole(session, -1) == self._session else None
        except ValueError:
            return None  # none of ours: as if nothing were decided


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's last sign of life for a run.

    Attributes:
        worker: its name.
        slots: actors it can run.
        busy: actors it runs now, of any run.
        host: for people.
        pid: of the process to signal: the worker's supervisor, or a bare Celery worker.
        time_ms: when, by the clock of the Redis server.
        restarts: how often it ended by itself and was started again.
    """

    worker: str
    slots: int
    busy: int
    host: str
    pid: int
    time_ms: int = 0
    restarts: int = 0


class Heartbeats:
    """Which workers serve a run. Times are the server's, so clocks of hosts do not matter."""

    def __init__(self, client: redis.Redis, keys: RunKeys, ttl_s: float = HEARTBEAT_TTL_S) -> None:
        self._client: Any = client
        self._key, self._ttl_s = keys.heartbeats, ttl_s

    def beat(self, beat: Heartbeat) -> None:
        """Write a sign of life (its `time_ms` is filled in)."""
        with translated(self._client):
            stamped = {**asdict(beat), "time_ms": _server_ms(self._client)}
            pipe = self._client.pipeline(transaction=True)
            pipe.hset(self._key, beat.worker, json.dumps(stamped))
            # The whole key goes when the last worker is long gone.
            pipe.pexpire(self._key, int(self._ttl_s * 10_000))
            pipe.execute()

    def leave(self, worker: str) -> None:
        """Say goodbye."""
        with translated(self._client):
            self._client.hdel(self._key, worker)

    def read(self) -> dict[str, Heartbeat]:
        """Workers heard of within the TTL."""
        return self._look()[0]

    def prune(self) -> dict[str, Heartbeat]:
        """The same; those that were silent for longer are removed."""
        alive, silent = self._look()
        if silent:
            with translated(self._client):
                self._client.hdel(self._key, *silent)
        return alive

    def _look(self) -> tuple[dict[str, Heartbeat], list[bytes]]:
        """(the living, names of the silent)."""
        with translated(self._client):
            now_ms = _server_ms(self._client)
            raw = self._client.hgetall(self._key)
        beats = {name: _heartbeat(text) for name, text in raw.items()}
        since_ms = now_ms - self._ttl_s * 1000
        alive = {
            name.decode(errors="replace"): beat for name, beat in beats.items() if beat and beat.time_ms >= since_ms
        }
        return alive, [name for name, beat in beats.items() if not beat or beat.time_ms < since_ms]


def _heartbeat(text: bytes) -> Heartbeat | None:
    try:
        beat = Heartbeat(**parse_object(text))
    except (ValueError, TypeError):
        return None
    numbers = (beat.slots, beat.busy, beat.pid, beat.time_ms, beat.restarts)
    sound = all(type(one) is int and 0 <= one < _LARGEST for one in numbers)
    return beat if sound and isinstance(beat.worker, str) and isinstance(beat.host, str) else None


def _server_ms(client: Any) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def delete_run(client: redis.Redis, keys: RunKeys, claim: Claim | None = None) -> int:
    """Unlink every key of a run on the data server; returns how many there were.

    Under a claim (which is spared) nothing is unlinked any more once it is lost: ClaimLost.
    """
    deleted = 0

    def unlink(batch: list[bytes]) -> int:
        if claim is None:
            return int(unfenced.unlink(*batch))
        claim.fenced(lambda pipe: pipe.unlink(*batch))
        return len(batch)

    unfenced: Any = client
    spared = None if claim is None else claim.key.encode()
    with translated(client):
        # A tag is hex, so only the prefix's braces could be special in a pattern, and in Redis they are not.
        batch: list[bytes] = []
        scan: Any = client.scan_iter(match=keys.prefix + "*", count=1000)
        for key in scan:
            if key == spared:
                continue
            batch.append(key)
            if len(batch) == 500:
                deleted += unlink(batch)
                batch.clear()
        if batch:
            deleted += unlink(batch)
    return deleted


def end_run(client: redis.Redis, keys: RunKeys, claim: Claim) -> None:
    """Delete a finished run, and leave for a while a control record that says stop.

    An actor that comes late then learns that the run is over, instead of waiting for a learner. The claim stays; if it
    is lost (ClaimLost), nothing more is touched.
    """
    delete_run(client, keys, claim)
    stopped = {"stop": 1, "window_bytes": 1, "config_epoch": 0}

    def leave_tombstone(pipe: Any) -> None:
        mapping = ControlSeal(keys.tag).sealed([None] * len(CONTROL_FIELDS), stopped)
        pipe.hset(keys.control, mapping=mapping)
        pipe.expire(keys.control, _TOMBSTONE_S)

    claim.fenced(leave_tombstone)
