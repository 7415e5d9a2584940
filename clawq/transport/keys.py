"""Every Redis key of clawq, spelled in this one place.

What belongs to a run starts with `clawq:{<tag>}:` (tag = 32 hex digits, chosen when the run is made). The braces are a
Redis Cluster hash tag: all keys of a run live in one slot, so MULTI and multi-stream XREAD work there too.

Data server (volatile, `noeviction`), below `clawq:{<tag>}:`

| name                 | type   | holds                            | bound or TTL             | writer, reader      |
|----------------------|--------|----------------------------------|--------------------------|---------------------|
| `control`            | hash   | head, stop, window, config       | 7 fields                 | learner, actors     |
|                      |        | epoch, names of required readers,|                          | and readers         |
|                      |        | serial and seal                  |                          |                     |
| `s:<slot>`           | stream | fragments, ids `<epoch>-<seq>`,  | byte budget of the run   | actor, readers      |
|                      |        | each with its ordinal            |                          |                     |
| `slots`              | hash   | slot -> JSON of its writer, of   | number of slots; swept   | actors, readers     |
|                      |        | when its stream began, and of    |                          |                     |
|                      |        | actors that ended without a word |                          |                     |
| `trimmed`            | hash   | slot -> last id and ordinal that | live slots, and the      | learner, actors     |
|                      |        | was trimmed                      | newest 1024 swept        | and readers         |
| `readers`            | hash   | reader -> JSON: role, since when | 32 readers               | readers, learner    |
| `cursors:<reader>`   | hash   | slot -> last id taken over       | number of slots; swept   | reader, actors      |
| `kept:<reader>`      | hash   | slot -> last id checkpointed     | number of slots; swept   | reader, learner     |
| `ledger:<reader>`    | hash   | slot -> settled, id, gap; sums   | number of slots; swept   | reader, CLI         |
| `swept`              | hash   | entries and lost actors of all   | 3 fields                 | learner, readers    |
|                      |        | swept streams, largest epoch     |                          | and actors          |
| `claim:<what>`       | string | JSON of token and holder         | TTL of the claim         | holder, anybody     |
| `w:<version>`        | hash   | meta, c0..cn of <= 1 MiB         | newest K and pinned      | learner, actors     |
| `w:staging:<token>`  | hash   | the same, not yet published      | TTL 10 min; renamed      | learner, nobody     |
| `versions`           | zset   | weights versions that are kept   | newest K and pinned      | learner, learner    |
| `pins`               | hash   | tag -> weights version           | number of tags           | coordinator, learner|
| `dead_letters`       | stream | head of an entry, size, reason   | ~200 entries of <= 4 KiB | learner, people     |
| `dead_entries`       | stream | whole entries of dead letters    | 8 MB, newest ones        | learner, people     |
| `dead_letter_counts` | hash   | reason -> count                  | number of reasons        | learner, people     |
| `events`             | stream | kind, facts (JSON)               | ~10 000 entries          | anybody, learner    |
| `orders`             | stream | kind, facts (JSON): stop, tune   | ~1 000 entries           | people, learner     |
| `metrics`            | hash   | name -> number or text (JSON)    | number of names          | learner, CLI        |
| `reaped`             | hash   | reason -> processes ended        | number of reasons        | watchdogs, CLI      |
| `pace`               | hash   | session, window that is decided  | 2 fields                 | coordinator, learner|
| `heartbeats`         | hash   | worker -> JSON                   | pruned; TTL of the key   | workers, coordinator|
| `born`               | string | token of this life of the keys   | 16 bytes                 | learner, readers    |

`<slot>` is the name of a worker's slot, `<host>-<worker>-<number>`; in a run that goes by rounds it is a seat,
`seat-<number>`.

Broker server (AOF)

| name                 | type   | holds                            | bound or TTL             | writer, reader      |
|----------------------|--------|----------------------------------|--------------------------|---------------------|
| `clawq:runs`         | hash   | run id -> JSON of the run record | number of live runs      | learner, workers    |
| `clawq.<run id>`     | list   | Celery queue of the run          | a few leases             | coordinator, workers|
| `clawq:attempts:<id>`| string | how often a command was begun    | TTL 1 day; late acks only| workers, people     |
| `clawq:dead_commands`| stream | commands that are not tried      | ~1000 entries of <= 4 KiB| workers, people     |
|                      |        | again, and garbage in queues     |                          |                     |
| `clawq:c:*`          | -      | what Celery keeps for itself     | Celery's; see control    | Celery, Celery      |

The queues get Celery's prefix too (see clawq.control.queues).
"""

import hashlib
import re
import secrets
from dataclasses import dataclass

#: Hash on the broker: run id -> run record.
RUNS_KEY = "clawq:runs"
#: Stream on the broker: commands that are not tried any more. Strings there: how often each was begun.
DEAD_COMMANDS_KEY, ATTEMPTS_PREFIX = "clawq:dead_commands", "clawq:attempts:"
#: The Celery queue of every worker; the queues of a run begin with it. Celery's keys begin with its prefix.
QUEUE, CELERY_PREFIX = "clawq", "clawq:c:"
#: Name of the one required reader that every run has.
LEARNER = "learner"
#: Name of the reader that writes a run's archive; it is part of the learner's process, and present when that is.
ARCHIVE = "archive"
#: What may stand in slot, reader and claim names; they become parts of keys and of file names.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
LONGEST_NAME = 128
#: Most readers of a run: what each has checkpointed is asked for before every trimming.
MOST_READERS = 32
_TAG_PATTERN = re.compile(r"[0-9a-f]{32}")


def new_tag() -> str:
    """A fresh 128-bit run tag, 32 hex digits."""
    return secrets.token_hex(16)


def queue_name(run_id: str) -> str:
    """Name of the run's Celery queue."""
    return f"{QUEUE}.{check_name(run_id)}"


def attempts_key(command: str) -> str:
    """String on the broker: how often that command was begun. Its id came over the wire: only its digest is used."""
    return f"{ATTEMPTS_PREFIX}{hashlib.sha256(command.encode()).hexdigest()[:32]}"


def check_name(name: str) -> str:
    """The name itself; ValueError if it cannot be part of a key."""
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be used in a Redis key: a name is 1 to 128 letters, digits and . _ : @ - and starts with "
            "a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run on the data server.

    Args:
        tag: the run's tag, 32 hex digits.
    """

    tag: str

    def __post_init__(self) -> None:
        if not _TAG_PATTERN.fullmatch(self.tag):
            raise ValueError(f"a run tag is 32 hex digits, not {self.tag!r}")

    @property
    def prefix(self) -> str:
        """What every key of the run begins with."""
        return f"clawq:{{{self.tag}}}:"

    @property
    def control(self) -> str:
        """Hash: the control record."""
        return self.prefix + "control"

    def stream(self, slot: str) -> str:
        """Stream of one slot's fragments."""
        return f"{self.prefix}s:{check_name(slot)}"

    @property
    def slots(self) -> str:
        """Hash: slot -> JSON of who writes it."""
        return self.prefix + "slots"

    @property
    def trimmed(self) -> str:
        """Hash: slot -> id and ordinal of the last entry that was trimmed from its stream."""
        return self.prefix + "trimmed"

    @property
    def readers(self) -> str:
        """Hash: reader -> JSON of its role and since when it follows."""
        return self.prefix + "readers"

    def cursors(self, reader: str = LEARNER) -> str:
        """Hash: slot -> id of the last entry that `reader` took over."""
        return f"{self.prefix}cursors:{check_name(reader)}"

    def kept(self, reader: str) -> str:
        """Hash: slot -> id of the last entry that `reader` has in a checkpoint (or the like) of its own."""
        return f"{self.prefix}kept:{check_name(reader)}"

    def ledger(self, reader: str = LEARNER) -> str:
        """Hash: slot -> how far `reader` has settled its stream, and the reader's sums."""
        return f"{self.prefix}ledger:{check_name(reader)}"

    @property
    def swept(self) -> str:
        """Hash of all streams that were swept away: `entries` acknowledged, actors `lost`, and the largest `epoch`."""
        return self.prefix + "swept"

    def claim(self, what: str) -> str:
        """String: who holds `what` (`learner`, `slot:<slot>`, `reader:<reader>`)."""
        return f"{self.prefix}claim:{check_name(what)}"

    def weights(self, version: int) -> str:
        """Hash: one published weights version."""
        return f"{self.prefix}w:{version:d}"

    def staging(self, token: str) -> str:
        """Hash: weights on their way in, not visible to readers."""
        return f"{self.prefix}w:staging:{check_name(token)}"

    @property
    def versions(self) -> str:
        """Sorted set: the weights versions that are kept."""
        return self.prefix + "versions"

    @property
    def pins(self) -> str:
        """Hash: tag -> pinned weights version."""
        return self.prefix + "pins"

    @property
    def dead_letters(self) -> str:
        """Stream: entries that were refused, with the reason."""
        return self.prefix + "dead_letters"

    @property
    def dead_entries(self) -> str:
        """Stream: the newest refused entries whole, under the ids of their dead letters."""
        return self.prefix + "dead_entries"

    @property
    def dead_letter_counts(self) -> str:
        """Hash: reason -> how many."""
        return self.prefix + "dead_letter_counts"

    @property
    def events(self) -> str:
        """Stream: what happened in the run."""
        return self.prefix + "events"

    @property
    def orders(self) -> str:
        """Stream: what people tell the run's learner to do."""
        return self.prefix + "orders"

    @property
    def metrics(self) -> str:
        """Hash: newest metrics for the screen."""
        return self.prefix + "metrics"

    @property
    def reaped(self) -> str:
        """Hash: reason -> how many processes watchdogs ended."""
        return self.prefix + "reaped"

    @property
    def pace(self) -> str:
        """Hash: the window that the coordinator of a session decided."""
        return self.prefix + "pace"

    @property
    def born(self) -> str:
        """String: chosen when a learner opens the run and finds none; gone with the run's other keys."""
        return self.prefix + "born"

    @property
    def heartbeats(self) -> str:
        """Hash: worker -> JSON of its last sign of life."""
        return self.prefix + "heartbeats"
