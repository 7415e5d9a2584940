"""`clawq bisect RUN`: the first fragment after which learning went wrong, with where it comes from."""

from typing import TYPE_CHECKING

import click

from clawq.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from clawq.programs.bisect import Suspect, Verdict
    from clawq.programs.recording import Recording


@click.command()
@click.argument("run")
@click.option("--metric", help="What is watched, as `critic_loss`; default: the algorithm's first loss.")
@click.option("--factor", default=100.0, show_default=True, type=click.FloatRange(min=1, min_open=True))
@click.option("--bound", type=click.FloatRange(min=0, min_open=True), help="Largest size of the metric.")
def bisect(run: str, metric: str | None, factor: float, bound: float | None) -> int:
    """Find the fragment with which the learning of RUN (a name, or a run folder) goes wrong.

    Wrong is an update that is not finite; a metric whose median over 20 updates is more than FACTOR times its highest
    earlier level; or one above BOUND. The log is replayed up to the first such update, then with ever fewer of the
    fragments before it. Exit status 0 if nothing goes wrong, 1 if something does.
    """
    stop = stop_on_signals()
    from clawq.cli.main import EXIT_INTERRUPTED
    from clawq.programs.bisect import Bisection, Stopped
    from clawq.programs.divergence import Limits
    from clawq.programs.recording import open_recording
    from clawq.programs.whereabouts import find_run

    recording = open_recording(find_run(run))
    try:
        verdict = Bisection(recording, Limits(metric, factor, bound), stop, click.echo).find()
    except Stopped:
        click.echo("stopped; nothing is concluded")
        return EXIT_INTERRUPTED
    for line in lines(run, recording, verdict):
        click.echo(line)
    return 0 if verdict.wrong is None else 1


def lines(run: str, recording: "Recording", verdict: "Verdict") -> list[str]:
    """The verdict as text."""
    if verdict.wrong is None:
        return [f"nothing goes wrong: {verdict.updates} updates, to the end of the recording"]
    told = [f"update {verdict.updates}: {verdict.wrong}"]
    if not verdict.culprits:
        return [
            *told,
            f"no fragment is to blame: it goes wrong whichever of the {verdict.fragments} are left out. Look at the "
            "learning rate, reward_scale and the algorithm's options",
        ]
    for culprit in verdict.culprits:
        told += _culprit(run, recording, culprit)
    if verdict.confirmed:
        told.append("without it" if len(verdict.culprits) == 1 else "without these")
        told[-1] += " learning stays sound"
    else:
        told.append("these are not all: without them it still goes wrong")
    return told


def _culprit(run: str, recording: "Recording", culprit: "Suspect") -> list[str]:
    import numpy as np

    from clawq.transport.codec import decode
    from clawq.transport.log import clock

    record = culprit.record
    name = f"{record.slot} {record.epoch}-{record.seq}"
    fragment = decode(recording.fetch(record.slot, record.epoch, record.seq).payload)
    meta, reward = fragment.meta, fragment.reward
    seen = max(float(np.abs(column).max()) for column in fragment.obs.values())
    return [
        f"culprit: fragment {culprit.number}, {name}, made {clock(meta.created_ms)} by {meta.worker}",
        f"  {meta.steps} steps of {meta.envs} envs under weights {meta.weights_version}, seed {meta.seed}; rewards "
        f"{float(reward.min()):.4g} to {float(reward.max()):.4g}, observations up to {seen:.4g}",
        f"  look at it:     clawq log show {run} {name}",
        f"  leave it out:   clawq log quarantine {run} --slot {record.slot} --epoch {record.epoch} "
        f"--from {record.seq} --to {record.seq}",
    ]
