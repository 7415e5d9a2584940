"""What is fuzzed: one module for each target, with `one_input(data)` and `seeds()`; `files` has a class with them.

`one_input` takes any bytes and returns, or raises what must never be raised: whatever is no error of ours, and
AssertionError where something was accepted that makes no sense. The same targets are used by the coverage-guided fuzzer
(ops/fuzz) and by the default tests, which replay what it has found (tests/fuzz/corpus).
"""

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from clawq import plugins

#: The five that issue 4 names, then the others.
NAMES = ("codec", "header", "control", "config", "lease", "records", "commands", "files", "yaml")
#: Those of which a share is enough: the reader of YAML is not ours, and takes milliseconds for each text.
SHARES = {"yaml": 0.1}


class Target(Protocol):
    """One module of this package, or what it makes in a folder."""

    def one_input(self, data: bytes) -> None:
        """Do with these bytes what clawq would do."""

    def seeds(self) -> list[bytes]:
        """Good inputs to begin with."""


def check_text(error: Exception, most: int = 1000) -> None:
    """An error is for people: it has words, and not a page of them."""
    assert 0 < len(str(error)) < most, str(error)[:200]


def points_read_once() -> Callable[[str], Any]:
    """To stand for `plugins._points` while fuzzing.

    Reading what is installed takes 20 ms, twenty times as long as all else of a configuration; it stays the same here.
    """
    return functools.cache(plugins._points)


def target(name: str, folder: Path) -> Target:
    """The one of that name. Files that it needs are in the folder, which the caller makes and removes."""
    module: Any = import_module(f"fuzzing.{name}")
    made: Target = module.Files(folder) if name == "files" else module
    return made
