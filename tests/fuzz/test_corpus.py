"""What the fuzzers have found so far, again: every input of the corpus, and random ones around it.

The corpus is made by ops/fuzz: a few small inputs that reach all the code that was ever reached. Inputs that once did
harm have names.
"""

from pathlib import Path

import fuzzing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq import plugins

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(autouse=True)
def _points_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_points", fuzzing.points_read_once())


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_no_input_of_the_corpus_raises_anything_but_our_errors(name: str, tmp_path: Path) -> None:
    target = fuzzing.target(name, tmp_path)
    found = sorted((CORPUS / name).iterdir())
    inputs = [*target.seeds(), *(path.read_bytes() for path in found)]
    assert found
    for data in inputs:
        target.one_input(data)


def _changed(target: fuzzing.Target) -> st.SearchStrategy[bytes]:
    """Good inputs with a piece of them replaced, and garbage."""

    def spliced(good: bytes, at: int, length: int, piece: bytes) -> bytes:
        start = at % (len(good) + 1)
        return good[:start] + piece + good[start + length :]

    seeds = target.seeds()
    odd = [b"\xff" * 9, b"-1", b"1e999", b"[" * 200, b'{"a":', b"\xed\xa0\x80"]
    pieces = st.binary(max_size=8) | st.sampled_from(odd)
    return st.binary(max_size=200) | st.builds(
        spliced, st.sampled_from(seeds), st.integers(0, 10_000), st.integers(0, 40), pieces
    )


def _check(target: fuzzing.Target, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(_changed(target))
    def check(data: bytes) -> None:
        target.one_input(data)

    check()


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_changed_inputs_raise_nothing_but_our_errors(name: str, tmp_path: Path) -> None:
    _check(fuzzing.target(name, tmp_path), 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_ten_thousand_changed_inputs_raise_nothing_but_our_errors(name: str, tmp_path: Path) -> None:
    _check(fuzzing.target(name, tmp_path), 10_000)
