"""Ctrl-C once and twice, while somebody waits for others and while nobody does."""

import os
import signal
from collections.abc import Iterator

import pytest

from clawq.cli.signals import interrupt_on_sigterm, stop_on_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses with which the process would have ended by force."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_a_second_one_ends_by_force_unless_it_is_heeded(ends: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    stop = stop_on_signals()
    signal.raise_signal(signal.SIGINT)
    assert stop.is_set()
    assert "once more to end at once" in capsys.readouterr().err
    with stop.heeding():
        assert not stop.again.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.again.is_set()
        assert ends == []
    signal.raise_signal(signal.SIGINT)
    assert ends == [130]


def test_under_clawq_up_the_first_one_is_heeded_too(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWQ_UP", "1")
    stop = stop_on_signals()
    with stop.heeding():
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        assert stop.again.is_set()
    assert ends == []


def test_where_both_interrupt_they_do_so_alike() -> None:
    interrupt_on_sigterm()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
