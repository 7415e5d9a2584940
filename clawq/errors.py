"""The one error tree.

A base class stands here because some caller catches it. Errors carry their facts as fields, and their text is for
people: what was wrong, where, what is allowed, what to do.

    ClawqError                    everything that clawq raises on purpose
      UserError                   a mistake in what the user wrote; the CLI prints it without a traceback
        ConfigError               the configuration: file, path and value are named (`mistakes` lists all of them)
        PluginError               PluginNotFound · PluginLoadFailed · DuplicatePlugin
      Interrupted                 stopped before anything had begun
      SpecMismatch                an array is not what the environment spec says
      UnsupportedSpace            an environment whose spaces clawq cannot carry
      TransportError
        StoreUnavailable          Redis is away (retryable)
          RecordUnreadable        what stands under a key of ours is not what clawq writes there
        StoreUnfit                Redis answers, but cannot be used as it is: version, policy, rights
        StoreFull                 Redis is out of memory (retryable: back off)
        StreamRejected            an id was refused and the entry is not there: a new epoch must begin
        FragmentTooLarge
        ClaimLost                 another process owns this slot or run now (control flow: stop acting quietly)
        ClaimHeld                 somebody else holds it (a second learner, a taken slot)
        WeightsGone               that version is no longer kept: read the head again
        WeightsCorrupt            digest or layout is wrong
        SignatureInvalid          not signed, or by somebody else, where this host demands a signature
      LogGone                     the log no longer holds what was asked for (a mistake of the user: also a UserError)
      ArchiveError                the archive on disk
        ArchiveUnfit              of another run or format
        ArchiveDamaged            a record or a header is not what was written
      CodecError                  UnsupportedWireVersion · CorruptFragment
      RateLimitTimeout            which side was blocked, the error, the bounds
      LearnerError                NonFiniteUpdate · TooManyNonFinite · AlgorithmFault · CheckpointInvalid ·
                                  CheckpointNotWritten · ScheduleInvalid · ExperienceGone
        CheckpointInvalid         SnapshotInvalid (the replay ring's part of it)
      ActorFailed                 an actor or another exec'ed program ended badly
      SimulatorFailed             the simulator cannot go on in this process (raised by environment plugins)
"""

from collections.abc import Mapping, Sequence


class ClawqError(Exception):
    """Base of every error that clawq raises on purpose."""

    #: Exit status of the CLI for this kind of error.
    exit_code = 1


class UserError(ClawqError):
    """Something the user wrote is wrong; shown as one paragraph, never as a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """One or more mistakes in a configuration.

    Args:
        source: the file (or "command line") in which the mistakes are.
        mistakes: one line each: `path: what is wrong; what is allowed`.
    """

    def __init__(self, source: str, mistakes: Sequence[str]) -> None:
        self.source = source
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {line}" for line in self.mistakes))


class Interrupted(ClawqError):
    """Somebody asked for the end before there was anything to end in order."""

    exit_code = 130


class PluginError(UserError):
    """A named plugin cannot be used."""


class PluginNotFound(PluginError):
    """No installed plugin of that kind has that name."""


class PluginLoadFailed(PluginError):
    """The plugin is installed, but importing it failed; the original error is the cause."""


class DuplicatePlugin(PluginError):
    """Two installed distributions register the same name."""


class SpecMismatch(ClawqError):
    """An array differs from the environment spec.

    Args:
        leaf: path of the array, as `obs.observation`.
        expected: dtype and shape in words.
        got: dtype and shape in words.
    """

    def __init__(self, leaf: str, expected: str, got: str) -> None:
        self.leaf, self.expected, self.got = leaf, expected, got
        super().__init__(f"{leaf}: expected {expected}, got {got}")


class UnsupportedSpace(UserError):
    """An environment has a space that clawq cannot carry; the text names the space and what is supported."""


class TransportError(ClawqError):
    """Something between us and Redis."""

    exit_code = 3


class StoreUnavailable(TransportError):
    """Redis cannot be reached, or went away (retryable)."""


class RecordUnreadable(StoreUnavailable):
    """Under a key of ours stands something else (retryable: until it is mended, it is as if Redis were away)."""


class StoreUnfit(TransportError):
    """Redis answers but cannot be used as it is: version too old, eviction policy, missing rights."""


class StoreFull(TransportError):
    """Redis refuses writes because it is out of memory (retryable: back off)."""


class StreamRejected(TransportError):
    """A stream refused an id and the entry is not there; the sender must begin a new epoch."""


class FragmentTooLarge(TransportError):
    """A fragment is over the size cap of the wire."""


class ClaimLost(TransportError):
    """The claim we acted under belongs to somebody else now; stop quietly."""


class ClaimHeld(TransportError):
    """Somebody else holds the claim; `holder` says who.

    Args:
        what: the thing that is claimed, in words.
        holder: who holds it, in words.
    """

    def __init__(self, what: str, holder: str) -> None:
        self.what, self.holder = what, holder
        super().__init__(f"{what} is held by {holder}")


class WeightsGone(TransportError):
    """That weights version is not kept any more; read the head again."""


class SignatureInvalid(TransportError):
    """Something is not signed as this host demands; the text says how."""


class WeightsCorrupt(TransportError):
    """Weights failed their digest or cannot be read."""


class LogGone(UserError):
    """The log does not hold (any more) what was asked for; the text says what it holds."""


class ArchiveError(ClawqError):
    """Something about the archive of the streams on disk."""


class ArchiveUnfit(ArchiveError):
    """An archive that cannot be used here: of another run, of another format, or being written by somebody else."""


class ArchiveDamaged(ArchiveError):
    """Bytes of the archive are not what was written; only what they held is lost."""


class CodecError(ClawqError):
    """Bytes that are not a fragment of ours; `reason` is the short name under which the drop is counted."""

    reason = "codec"


class UnsupportedWireVersion(CodecError):
    """A fragment of another clawq wire version."""

    reason = "wire_version"


class CorruptFragment(CodecError):
    """Truncated, garbled or inconsistent bytes."""

    reason = "corrupt"


class RateLimitTimeout(ClawqError):
    """One side of the rate limiter was blocked for too long.

    Args:
        side: `insert` or `sample`.
        error: inserts · samples_per_insert − samples.
        bounds: the least and largest error allowed.
        waited_s: how long the side waited.
    """

    def __init__(self, side: str, error: float, bounds: tuple[float, float], waited_s: float) -> None:
        self.side, self.error, self.bounds, self.waited_s = side, error, bounds, waited_s
        super().__init__(
            f"rate limiter: {side} was blocked for {waited_s:.1f} s; error {error:.0f}, allowed "
            f"{bounds[0]:.0f}..{bounds[1]:.0f}. The other side is not making progress."
        )


class RoundTimeout(ClawqError):
    """A round waited for too long for its actors.

    Args:
        version: the weights version of the round.
        waited_s: how long.
        missing: who has not brought its quota, in words.
    """

    def __init__(self, version: int, waited_s: float, missing: str) -> None:
        self.version, self.waited_s, self.missing = version, waited_s, missing
        super().__init__(
            f"round {version} waited {waited_s:.0f} s in vain for {missing}. It is called again: all collect anew, and "
            "what was brought is used with it. More actors (`clawq worker start`), fewer sync.actors, or a "
            "sync.deadline_s with a sync.quorum would let it go on."
        )


class NoSeat(ClawqError):
    """All seats of a run's rounds are taken: this actor stands by."""


class LearnerError(ClawqError):
    """The learner cannot go on."""

    exit_code = 4


class NonFiniteUpdate(LearnerError):
    """A loss or gradient was not finite; the weights are unchanged.

    Args:
        step: index of the update.
        metrics: the losses and norms that were seen, by name.
    """

    def __init__(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.metrics = step, dict(metrics)
        shown = ", ".join(f"{name}={value:g}" for name, value in self.metrics.items())
        super().__init__(f"update {step} was skipped: not finite ({shown})")


class TooManyNonFinite(LearnerError):
    """Several updates in a row were not finite."""


class AlgorithmFault(LearnerError):
    """An algorithm plugin gave something that its side of the protocol does not allow; the text names it.

    Args:
        plugin: name of the algorithm.
        what: what it gave, and what was expected.
    """

    def __init__(self, plugin: str, what: str) -> None:
        self.plugin = plugin
        super().__init__(f"the algorithm plugin {plugin} is at fault: {what}")


class CheckpointInvalid(LearnerError):
    """A checkpoint cannot be used: damaged, of another run or of another shape."""


class SnapshotInvalid(CheckpointInvalid):
    """A snapshot of the replay ring, or a file of it, cannot be used: missing, damaged, of another run or shape."""


class CheckpointNotWritten(LearnerError):
    """A checkpoint could not be written (disk full, no rights); the older ones are intact and training can go on."""


class ScheduleInvalid(LearnerError):
    """A recorded schedule cannot be used: damaged, of another format, or it does not reach back so far."""


class ExperienceGone(LearnerError):
    """A fragment that a schedule names is kept nowhere any more."""


class SimulatorFailed(ClawqError):
    """The simulator cannot go on in this process, but perhaps in a new one: a lost CUDA context, a fatal error of it.

    For environment plugins to raise from `reset`, `step` or `restart`. The actor sends what it has, and its process is
    replaced. A simulator whose native code ends the process itself exits with `exit_code`, to be counted the same.
    """

    exit_code = 86


class ActorFailed(ClawqError):
    """An actor (or another exec'ed program) ended badly; the text has the last lines of its log."""
