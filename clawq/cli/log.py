"""`clawq log ...`: the experience of a run as a log. The group alone; each subcommand is a module of its own.

To add one, write a click command in a module `clawq.cli.<name>` and a row of `SUBCOMMANDS`; it is imported when it is
used.
"""

from collections.abc import Mapping
from types import MappingProxyType

import click

from clawq.cli.main import LazyGroup

#: subcommand -> (module:attribute, one line of help).
SUBCOMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ls": ("clawq.cli.log_ls:ls", "List fragments: when, by whom, under which weights."),
        "show": ("clawq.cli.log_show:show", "Show one fragment: header, columns, episodes, what became of it."),
        "dlq": ("clawq.cli.log_dlq:dlq", "Show what the learner refused, and why."),
        "export": ("clawq.cli.log_export:export", "Write episodes as HDF5 (Minari) or Parquet."),
        "ledger": ("clawq.cli.ledger:ledger", "Balance the books: what became of every fragment."),
        "quarantine": ("clawq.cli.quarantine:quarantine", "Never sample a worker's or an interval's experience again."),
    }
)


class LogGroup(LazyGroup):
    """The subcommands of `clawq log`."""

    def table(self) -> Mapping[str, tuple[str, str]]:
        return SUBCOMMANDS


@click.group(cls=LogGroup)
def log() -> None:
    """Look into the experience of a run: list, show, export."""
