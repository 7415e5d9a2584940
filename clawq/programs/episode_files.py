"""Files that episodes are exported to: what all formats share.

A file gets its name when it is whole; until then it has a temporary one, and an export that fails leaves nothing. The
libraries of the formats come with the extra `export` and are imported when they are needed.
"""

import os
import shutil
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from clawq.errors import UserError
from clawq.programs.episodes import Episode


class EpisodeWriter(Protocol):
    """Where exported episodes go; a context manager that takes back what it wrote if it is left by an error."""

    steps: int
    episodes: int

    def write(self, episode: Episode) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def need(module: str, what: str) -> Any:
    """Import a library of the extra `export`; UserError if it is not there."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError(
            f"{what} needs {module}, which is not installed. Install it with clawq's extra `export`: "
            "pip install 'clawq[export]', or in a checkout: pip install -e '.[export]'"
        ) from None


class Partial:
    """A file or folder that gets its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.steps = self.episodes = 0

    def finish(self) -> None:
        os.replace(self.partial, self.path)

    def drop(self) -> None:
        if self.partial.is_dir():
            shutil.rmtree(self.partial)
        else:
            self.partial.unlink(missing_ok=True)
