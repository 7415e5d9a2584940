"""`clawq log export RUN`: the run's experience as HDF5 in Minari's layout, or as Parquet."""

import time
from pathlib import Path

import click

from clawq.cli.times import milliseconds


@click.command()
@click.argument("run")
@click.option("--format", "kind", type=click.Choice(["hdf5", "parquet"]), required=True, help="What to write.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Where to; HDF5: a folder (Minari), or NAME.hdf5."
)
@click.option("--slot", "slots", multiple=True, help="Only this slot; may be given several times.")
@click.option("--since", help="Made at or after this time: 2026-11-29T21:00, or 15m (ago; s, m, h, d).")
@click.option("--until", help="Made before this time.")
@click.option("--max-steps", type=click.IntRange(1), help="Stop after the episode with which there are so many steps.")
@click.option(
    "--incomplete",
    type=click.Choice(["mark", "skip"]),
    default="mark",
    show_default=True,
    help="Episodes that the log breaks off.",
)
def export(
    run: str,
    kind: str,
    out: Path,
    slots: tuple[str, ...],
    since: str | None,
    until: str | None,
    max_steps: int | None,
    incomplete: str,
) -> None:
    """Write the episodes of RUN (a name, or a run folder) to files that other programs read.

    Rows that are no transitions and fragments that the learner refuses are left out. Of a run that goes on, what the
    log holds by then is exported; it is neither held back nor disturbed. Needs the extra `export`.
    """
    from clawq.errors import LogGone
    from clawq.programs.export import export as write
    from clawq.programs.export import open_writer
    from clawq.programs.logbook import open_logbook

    book, now_s = open_logbook(run), time.time()
    since_ms = milliseconds("since", since, now_s) if since else None
    # Without an end, an export of a run that outpaces it would never end.
    until_ms = milliseconds("until", until, now_s) if until else int(1000 * now_s) if book.streams else None
    book.log.require(since_ms if since_ms is not None and not _is_ago(since) else None, slots)
    entries = book.log.entries(slots or None, since_ms, until_ms)
    with open_writer(kind, out, book.spec) as writer:
        done = write(entries, book.examiner, writer, keep_incomplete=incomplete == "mark", max_steps=max_steps)
        if not done.episodes:
            # Within the writer: it takes back the empty file.
            raise LogGone(f"there is nothing to export; {book.log.describe(slots or None)}")
    click.echo(f"{done.episodes} episodes, {done.steps} steps: {out}")
    if done.incomplete:
        click.echo(f"{done.incomplete} of the episodes are incomplete: the log breaks them off (marked)")
    if done.skipped_steps:
        click.echo(f"{done.skipped_steps} steps of incomplete episodes were left out")
    for reason, count in sorted(done.refused.items()):
        click.echo(f"{count} fragments were left out: {reason}")
    if book.log.lost:
        click.echo(f"{book.log.lost} fragments could not be read; see `clawq log ls {run}`", err=True)
    if done.stopped:
        click.echo(f"stopped: {done.stopped}")


def _is_ago(text: str | None) -> bool:
    """Relative times mean what there is of them; an absolute one that the log does not reach back to is an error."""
    return text is not None and text[-1] in "smhd"
