"""`clawq log export RUN`: the run's experience as HDF5 in Minari's layout, or as Parquet."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clawq.cli.signals import interrupt_on_sigterm, stop_on_signals
from clawq.cli.times import milliseconds

if TYPE_CHECKING:
    from clawq.programs.export import Exported


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
@click.option("--follow", is_flag=True, help="Go on with what RUN makes from now on, until it ends, or Ctrl-C.")
@click.option("--reader", metavar="NAME", help="With --follow: name among RUN's readers.")
@click.option("--required", is_flag=True, help="With --follow: RUN's streams, actors and end wait for this export.")
def export(
    run: str,
    kind: str,
    out: Path,
    slots: tuple[str, ...],
    since: str | None,
    until: str | None,
    max_steps: int | None,
    incomplete: str,
    follow: bool,
    reader: str | None,
    required: bool,
) -> None:
    """Write the episodes of RUN (a name, or a run folder) to files that other programs read.

    Rows that are no transitions and fragments that the learner refuses are left out. Of a run that goes on, what the
    log holds by then is exported; it is neither held back nor disturbed. Needs the extra `export`.

    With --follow the export is one of RUN's readers until the run ends: it begins with what the streams hold, and is
    told what it missed.
    """
    if follow:
        if since is not None or until is not None:
            raise click.UsageError("--follow begins with what the streams hold; --since and --until do not go with it")
        _follow(run, kind, out, slots, max_steps, incomplete, reader, required)
        return
    if reader is not None or required:
        raise click.UsageError("--reader and --required need --follow")
    interrupt_on_sigterm()
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
    _tell(done, out)
    if book.log.lost:
        click.echo(f"{book.log.lost} fragments could not be read; see `clawq log ls {run}`", err=True)


def _follow(
    run: str,
    kind: str,
    out: Path,
    slots: tuple[str, ...],
    max_steps: int | None,
    incomplete: str,
    reader: str | None,
    required: bool,
) -> None:
    stop = stop_on_signals()
    from clawq.errors import LogGone, UserError
    from clawq.programs.export import export as write
    from clawq.programs.export import open_writer
    from clawq.programs.export_follow import FollowedRun, find_running, reader_name
    from clawq.replay.validation import Examiner, FragmentCheck
    from clawq.state import resolve_urls
    from clawq.transport.codec import decode

    urls = resolve_urls()
    if urls is None:
        raise UserError(
            "no clawq Redis is running on this machine; for one elsewhere set CLAWQ_BROKER_URL and CLAWQ_DATA_URL"
        )
    record, name = find_running(run, urls[0]), reader_name(reader)
    followed = FollowedRun(record, urls, name, required)
    with open_writer(kind, out, followed.spec) as writer:
        click.echo(
            f"following {run} as {'required' if required else 'optional'} reader {name}, until it ends or Ctrl-C"
        )
        entries = followed.entries(slots, stop, click.echo)
        examiner = Examiner(decode, FragmentCheck(followed.spec, record.tag))
        try:
            done = write(entries, examiner, writer, keep_incomplete=incomplete == "mark", max_steps=max_steps)
        finally:
            entries.close()
        if not done.episodes:
            raise LogGone(f"there is nothing to export: {followed.ended or 'no step came'}")
    _tell(done, out)
    if followed.missed:
        click.echo(
            f"{followed.missed} fragments were trimmed before this export came to them; with --required the run waits"
        )
    if followed.ended:
        click.echo(f"ended: {followed.ended}")


def _tell(done: "Exported", out: Path) -> None:
    click.echo(f"{done.episodes} episodes, {done.steps} steps: {out}")
    if done.incomplete:
        click.echo(f"{done.incomplete} of the episodes are incomplete: the log breaks them off (marked)")
    if done.skipped_steps:
        click.echo(f"{done.skipped_steps} steps of incomplete episodes were left out")
    for reason, count in sorted(done.refused.items()):
        click.echo(f"{count} fragments were left out: {reason}")
    if done.stopped:
        click.echo(f"stopped: {done.stopped}")


def _is_ago(text: str | None) -> bool:
    """Relative times mean what there is of them; an absolute one that the log does not reach back to is an error."""
    return text is not None and text[-1] in "smhd"
