"""Texts in Redis that somebody else may have written: what is taken, and what is left out or refused."""

import pytest

from clawq.transport.texts import parse_cursor, parse_cursors, parse_whole


def test_whole_numbers_are_taken_and_nothing_else() -> None:
    assert (parse_whole(b"12"), parse_whole(None, 7), parse_whole(b"0")) == (12, 7, 0)
    for text in (b"", b"-1", b"+1", b" 1", b"1_0", b"1.5", b"\xd9\xa1", b"\xff", b"9" * 20, b"9" * 5000, b"%d" % 2**63):
        with pytest.raises(ValueError, match="is no whole number"):
            parse_whole(text)


def test_cursors_that_are_no_ids_are_left_out() -> None:
    assert parse_cursors({b"a": b"5-1", b"b": b"5", b"c": b"x-1", b"d": b"5-1 ", b"e": b""}) == {"a": "5-1"}
    assert [parse_cursor(raw) for raw in (b"5-1", b"5", None, "5-1", 5)] == ["5-1", None, None, None, None]
