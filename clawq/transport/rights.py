"""Who may do what on the two Redis servers: one table, from which ACL users are made (clawq.transport.acl).

    worker     gives its slots: writes the streams and claims of its own slots, reads weights and control record, and
               appends to events. It may not write weights or the control record, another worker's stream, or an order.
    learner    trains, stops and tunes runs: everything below a run's keys, and nothing else; no command of an admin
    watchdog   reads all that a host's watchdog looks at, takes the claims of what it ends, tells and counts it; clawq's
               own acts with the URLs of each process that it ends, so workers may do that for what is theirs
    viewer     reads, and changes nothing
    admin      everything; for people who look after the servers

Rights of Redis go by command and key, not by field: the hashes in which all workers announce themselves (`slots`,
`heartbeats`) can be scribbled on by each of them. What is in there is believed by nobody without looking: SECURITY.md.

A run's tag is not known when users are made, so the patterns hold for every run.
"""

from dataclasses import dataclass

from clawq.transport.keys import ATTEMPTS_PREFIX, CELERY_PREFIX, DEAD_COMMANDS_KEY, QUEUE, RUNS_KEY, RunKeys

#: Roles that exist once; every other user is a worker, and its slots are named after it.
ROLES = ("learner", "watchdog", "viewer", "admin")
_TAG = "0" * 32
#: `*` stands for any tag: a run's keys have one closing brace, right behind it.
_KEYS, _ANY = RunKeys(_TAG), "*"
#: A name that no key has, replaced by `*` in patterns.
_NAME = "NAME"
_CONNECTION = ("ping", "hello", "select", "info", "time", "client|setname", "multi", "exec", "discard", "unwatch")
_READING = (
    *("exists", "get", "mget", "hget", "hmget", "hgetall", "hkeys", "hvals", "hlen", "llen", "zrange"),
    *("xlen", "xrange", "xrevrange", "xread", "xinfo|stream", "watch"),
)
_WRITING = (
    *("set", "del", "unlink", "rename", "persist", "expire", "pexpire", "hset", "hdel", "hincrby", "zadd", "zrem"),
    *("xadd", "xtrim"),
)


@dataclass(frozen=True, slots=True)
class Grant:
    """Some commands on some keys.

    Attributes:
        commands: names, as Redis' ACL rules spell them.
        reads: patterns of keys that may be read.
        writes: patterns of keys that may be written.
    """

    commands: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def data_keys() -> dict[str, str]:
    """Name in the table of clawq.transport.keys -> pattern, of every key on the data server."""
    spelled = {
        "control": _KEYS.control,
        "s:<slot>": _KEYS.stream(_NAME),
        "slots": _KEYS.slots,
        "trimmed": _KEYS.trimmed,
        "readers": _KEYS.readers,
        "cursors:<reader>": _KEYS.cursors(_NAME),
        "kept:<reader>": _KEYS.kept(_NAME),
        "ledger:<reader>": _KEYS.ledger(_NAME),
        "swept": _KEYS.swept,
        "claim:<what>": _KEYS.claim(_NAME),
        "w:<version>": _KEYS.weights(0)[:-1] + _NAME,
        "w:staging:<token>": _KEYS.staging(_NAME),
        "versions": _KEYS.versions,
        "pins": _KEYS.pins,
        "dead_letters": _KEYS.dead_letters,
        "dead_entries": _KEYS.dead_entries,
        "dead_letter_counts": _KEYS.dead_letter_counts,
        "events": _KEYS.events,
        "orders": _KEYS.orders,
        "metrics": _KEYS.metrics,
        "reaped": _KEYS.reaped,
        "pace": _KEYS.pace,
        "heartbeats": _KEYS.heartbeats,
        "born": _KEYS.born,
    }
    return {name: key.replace(_TAG, _ANY).replace(_NAME, "*") for name, key in spelled.items()}


def data_rights(user: str, seats: bool = False) -> list[Grant]:
    """What a user may do on the data server.

    Args:
        user: one of ROLES, or the name of a worker.
        seats: workers may take the seats of runs that go by rounds, which belong to all of them.
    """
    keys = data_keys()
    everything = tuple(keys.values())
    if user == "learner":
        # SCAN shows names of keys, to delete those of a run that is over.
        return [Grant((*_CONNECTION, *_READING, *_WRITING, "scan"), everything, everything)]
    if user == "viewer":
        return [Grant((*_CONNECTION, *_READING), everything)]
    if user == "watchdog":
        return [
            Grant((*_CONNECTION, *_READING), everything),
            Grant(("xadd",), writes=(keys["events"],)),
            Grant(("hset", "hdel", "pexpire"), writes=(keys["heartbeats"],)),
            # It takes the claim of what it ends, and counts it.
            Grant(("set", "get", "pexpire", "del", "watch"), (keys["claim:<what>"],), (keys["claim:<what>"],)),
            Grant(("hincrby",), (keys["reaped"],), (keys["reaped"],)),
        ]
    names = (f"{user}-", "seat-") if seats else (f"{user}-",)
    streams = tuple(keys["s:<slot>"].replace("s:*", f"s:{name}*") for name in names)
    claims = tuple(keys["claim:<what>"].replace("claim:*", f"claim:slot:{name}*") for name in names)
    read = ("control", "trimmed", "swept", "cursors:<reader>", "w:<version>", "slots", "heartbeats")
    return [
        Grant((*_CONNECTION, "hget", "hmget", "hgetall"), tuple(keys[name] for name in read)),
        Grant(("xadd", "xrange", "xinfo|stream"), streams, streams),
        Grant(("set", "get", "mget", "pexpire", "del", "watch"), claims, claims),
        Grant(("hset",), writes=(keys["slots"],)),
        Grant(("hset", "hdel", "pexpire"), writes=(keys["heartbeats"],)),
        # The host's watchdog ends hung actors as their worker: it reports what the run told last, tells and counts it.
        Grant(("xadd", "xrevrange"), (keys["events"],), (keys["events"],)),
        Grant(("hincrby",), (keys["reaped"],), (keys["reaped"],)),
    ]


def broker_keys() -> dict[str, tuple[str, ...]]:
    """The same of the broker; Celery's own keys are `clawq:c:*`, without those of its queues."""
    kept = (f"{CELERY_PREFIX}unacked", f"{CELERY_PREFIX}unacked_index", f"{CELERY_PREFIX}unacked_mutex")
    # Of every queue there is a list for each priority, behind its name.
    queues = (f"{CELERY_PREFIX}{QUEUE}*",)
    return {
        RUNS_KEY: (RUNS_KEY,),
        "clawq.<run id>": queues,
        f"{ATTEMPTS_PREFIX}<id>": (f"{ATTEMPTS_PREFIX}*",),
        DEAD_COMMANDS_KEY: (DEAD_COMMANDS_KEY,),
        f"{CELERY_PREFIX}*": (*kept, f"{CELERY_PREFIX}_kombu.binding*"),
    }


def broker_rights(user: str) -> list[Grant]:
    """What a user may do on the broker: a worker takes commands of all runs, a learner sends them."""
    lists, kept = broker_keys()["clawq.<run id>"], broker_keys()[f"{CELERY_PREFIX}*"]
    # Celery's locks and deadlines are Lua scripts of its own.
    lua = ("evalsha", "script|load")
    if user == "learner":
        return [
            Grant((*_CONNECTION, "llen", "lpush", "del", "sadd", *lua), (*lists, kept[-1]), (*lists, kept[-1])),
            Grant(("hget", "hvals", "hset", "hdel", "watch"), (RUNS_KEY,), (RUNS_KEY,)),
            # What workers set aside is given back or dropped, and its attempts are forgotten.
            Grant(("xrevrange", "xdel"), (DEAD_COMMANDS_KEY,), (DEAD_COMMANDS_KEY,)),
            Grant(("unlink",), writes=broker_keys()[f"{ATTEMPTS_PREFIX}<id>"]),
        ]
    if user in ("viewer", "watchdog"):
        return [Grant((*_CONNECTION, "hget", "hvals", "llen", "xrevrange"), (RUNS_KEY, *lists, DEAD_COMMANDS_KEY))]
    own, [attempts] = (*lists, *kept), broker_keys()[f"{ATTEMPTS_PREFIX}<id>"]
    listing = ("brpop", "llen", "lpush", "rpush", "watch")
    keeping = ("hset", "hget", "hdel", "zadd", "zrem", "zrange", "sadd", "set", "get", "del", *lua)
    return [
        Grant((*_CONNECTION, *listing, *keeping), own, own),
        Grant(("hget", "hvals"), (RUNS_KEY,)),
        Grant(("incrby", "expire", "unlink"), (attempts,), (attempts,)),
        Grant(("xadd",), writes=(DEAD_COMMANDS_KEY,)),
    ]


__all__ = ["ROLES", "Grant", "broker_keys", "broker_rights", "data_keys", "data_rights"]
