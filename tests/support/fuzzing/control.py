"""The control record, as actors read it: seven fields, parted by a byte that no field holds."""

from clawq.errors import RecordUnreadable
from clawq.json_text import LARGEST
from clawq.transport.keys import LEARNER, MOST_READERS, RunKeys
from clawq.transport.signing import CONTROL_FIELDS, ControlSeal, NoSeal
from fuzzing import check_text

_KEYS = RunKeys("0" * 32)
_BETWEEN = b"\xff"


def one_input(data: bytes) -> None:
    """Parse the record; what is accepted can be used."""
    given: list[bytes | None] = [part or None for part in data.split(_BETWEEN)[: len(CONTROL_FIELDS)]]
    values = given + [None] * (len(CONTROL_FIELDS) - len(given))
    try:
        control = ControlSeal(_KEYS.tag, NoSeal()).parse(values)
    except RecordUnreadable as error:
        check_text(error)
        return
    if control is None:
        return
    assert all(0 <= number < LARGEST for number in (control.head, control.window_bytes, control.config_epoch))
    assert 0 < len(control.required) <= 2 * MOST_READERS * 65
    for reader in control.required:
        _KEYS.cursors(reader)
    again = [control.head, int(control.stop), control.window_bytes, control.config_epoch, ",".join(control.required)]
    written = [*(str(value).encode() for value in again), None, None]
    assert ControlSeal(_KEYS.tag, NoSeal()).parse(written) == control


def seeds() -> list[bytes]:
    """What learners write."""
    return [
        _BETWEEN.join((b"7", b"0", b"1048576", b"1", f"{LEARNER},copy".encode())),
        _BETWEEN.join((b"", b"1", b"1", b"0")),
    ]
