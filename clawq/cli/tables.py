"""Tables on stdout: drawn on a terminal, plain aligned columns everywhere else."""

import sys
from collections.abc import Sequence

import click


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows under a header; the columns named in `right` are set flush right."""
    if sys.stdout.isatty():
        _drawn(header, rows, right)
        return
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _drawn(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        # Not markup: names come from others.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
