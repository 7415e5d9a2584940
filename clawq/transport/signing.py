"""Seals: proof that weights and control record come from the run's learner, and not from whoever can write to Redis.

The learner's host and its workers share a key, in a file of their own that CLAWQ_SIGNING_KEY_FILE names on each; then
the learner seals what it writes (HMAC-SHA256), and workers take nothing else. A seal binds what it is, the run's tag
and every field: weights of another run or under another version number, and control records older than one that was
seen, are refused too. The key is one for all, so a worker that has it could seal as well: what keeps workers from
writing is their ACL user. Without the variable nothing is sealed and nothing is asked for.
"""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from clawq.core import Control
from clawq.errors import SignatureInvalid, UserError
from clawq.transport.keys import LEARNER, LONGEST_NAME, MOST_READERS, check_name
from clawq.transport.listening import read_private
from clawq.transport.texts import parse_whole, unreadable

log = logging.getLogger(__name__)

KEY_VARIABLE = "CLAWQ_SIGNING_KEY_FILE"
#: Shorter keys can be guessed.
LEAST_KEY_BYTES = 32
#: Fields of the control record in the order in which they are fetched; the learner writes the first four.
CONTROL_FIELDS = ("head", "stop", "window_bytes", "config_epoch", "required", "serial", "seal")
WRITTEN_FIELDS = CONTROL_FIELDS[:4]


class Seal(Protocol):
    """Makes seals and looks at them."""

    def fields(self, kind: str, tag: str, *parts: bytes) -> dict[str, str]:
        """What to store beside the parts: a seal, or nothing."""

    def check(self, seal: bytes | None, kind: str, tag: str, *parts: bytes) -> None:
        """SignatureInvalid unless the seal is one of these parts."""


class NoSeal:
    """This host has no key: nothing is sealed, and nothing is asked for."""

    def fields(self, kind: str, tag: str, *parts: bytes) -> dict[str, str]:
        return {}

    def check(self, seal: bytes | None, kind: str, tag: str, *parts: bytes) -> None:
        return


class HmacSeal:
    """Seals with a key.

    Args:
        key: the secret that all hosts of a run share.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def fields(self, kind: str, tag: str, *parts: bytes) -> dict[str, str]:
        return {"seal": self._digest(kind, tag, *parts)}

    def check(self, seal: bytes | None, kind: str, tag: str, *parts: bytes) -> None:
        if seal is None:
            raise SignatureInvalid(
                f"not signed, and this host demands that ({KEY_VARIABLE}). Does the learner's host have the key?"
            )
        if not hmac.compare_digest(seal, self._digest(kind, tag, *parts).encode()):
            raise SignatureInvalid(
                "the signature is not of this run's learner: forged, of another run, or this host has another key"
            )

    def _digest(self, kind: str, tag: str, *parts: bytes) -> str:
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (kind.encode(), tag.encode(), *parts):
            # With its length, so that no two different lists of parts read the same.
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()


def host_seal(env: Mapping[str, str] | None = None) -> Seal:
    """The seal of this host.

    Raises:
        UserError: the key file that it names cannot be used.
    """
    env = os.environ if env is None else env
    file = env.get(KEY_VARIABLE)
    if not file:
        return NoSeal()
    key = read_private(Path(file)).strip().encode()
    if len(key) < LEAST_KEY_BYTES:
        raise UserError(
            f"{KEY_VARIABLE}={file} holds {len(key)} characters; a key has {LEAST_KEY_BYTES} or more, random ones: "
            f"`(umask 077; openssl rand -base64 48 > {file})`"
        )
    return HmacSeal(key)


class ControlSeal:
    """The control record of one run, sealed and looked at.

    Args:
        tag: of the run.
        seal: of this host; None = look it up.
    """

    def __init__(self, tag: str, seal: Seal | None = None) -> None:
        self._tag, self._seal = tag, host_seal() if seal is None else seal
        self._serial = 0
        self._refused = False

    def sealed(self, before: Sequence[bytes | None], changes: Mapping[str, int]) -> dict[str, str | int]:
        """The changes, with what seals them together with the fields that stay.

        Args:
            before: the record's CONTROL_FIELDS; only looked at where this host seals.
            changes: fields of WRITTEN_FIELDS.
        """
        serial = max(time.time_ns() // 1_000_000, self._serial + 1, _number(before[5]) + 1)
        whole = dict(zip(WRITTEN_FIELDS, before, strict=False)) | {
            name: str(value).encode() for name, value in changes.items()
        }
        seal = self._seal.fields("control", self._tag, *_parts([*whole.values()], serial))
        if not seal:
            return dict(changes)
        self._serial = serial
        return {**changes, "serial": serial, **seal}

    def parse(self, values: Sequence[bytes | None]) -> Control | None:
        """The record; None if the learner has not written it, or if it is not one to believe.

        Args:
            values: CONTROL_FIELDS.

        Raises:
            RecordUnreadable: it is what the learner never writes.
        """
        head, stop, window_bytes, config_epoch, required, serial, seal = values
        # A publisher may move `head` before the learner wrote the rest: that alone is no record yet.
        if window_bytes is None or config_epoch is None:
            return None
        try:
            self._seal.check(seal, "control", self._tag, *_parts(values[:4], _number(serial)))
            if _number(serial) < self._serial:
                raise SignatureInvalid("it is older than one that was seen before")
        except SignatureInvalid as error:
            if not self._refused:
                log.error("the control record of run %s is refused: %s", self._tag, error)
            self._refused = True
            return None
        self._refused = False
        try:
            control = Control(
                parse_whole(head),
                bool(parse_whole(stop)),
                parse_whole(window_bytes),
                parse_whole(config_epoch),
                _reader_names(required),
            )
        except ValueError as error:
            raise unreadable("the control record", error) from None
        self._serial = _number(serial)
        return control


def _reader_names(text: bytes | None) -> tuple[str, ...]:
    if not text:
        return (LEARNER,)
    # Each is asked for with every send.
    if len(text) > MOST_READERS * (LONGEST_NAME + 1):
        raise ValueError("its readers are more than there can be")
    names = tuple(text.decode().split(","))
    for name in names:
        check_name(name)
    return names


def _parts(written: Sequence[bytes | None], serial: int) -> list[bytes]:
    return [*(b"" if value is None else value for value in written), str(serial).encode()]


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) < 20 else 0


__all__ = [
    "CONTROL_FIELDS",
    "KEY_VARIABLE",
    "WRITTEN_FIELDS",
    "ControlSeal",
    "HmacSeal",
    "NoSeal",
    "Seal",
    "host_seal",
]
