"""The architecture in one page: the protocols between the layers, each with the loop that calls it.

An actor process runs

    obs = env.reset(seed)
    while leased:
        action, extras = policy.explore(obs, explorer)
        result = env.step(spec.action.to_env(action))
        adder.add(...)                     # -> fragment -> outbox -> FragmentSink
        if between fragments: policy.load(weights_source.fetch_newer(version))

and the learner process runs

    consumer thread: for fragment in source.read(): validate, deduplicate, stage
    main thread:     commit staged fragments to the ring as the rate limiter allows
                     batch = sampler.sample(); metrics = algorithm.step(batch)
                     publisher.publish(algorithm.weights())

Nobody here knows Redis, Celery or a simulator. Tensors are typed `Any`, because this layer must not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from clawq.specs import EnvSpec
from clawq.types import Array, BoolArray, FloatArray, Fragment, Metrics, Obs

# --- environments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one batched env step gives.

    Attributes:
        obs: key -> [N, ...]; for an env that ended it is already the first observation of its next episode (or, where
            the source cannot do that, the last one of the old episode, and the next row of that env is not valid).
        reward: float32 [N].
        terminated: bool [N].
        truncated: bool [N].
        valid: bool [N]; False for rows that are no transition.
        final_obs: key -> [K, ...], the true last observation of each env that ended, in env order; empty rows if none.
        success: float32 [N]; 1 or 0 where the env reports success at this step, else nan.
    """

    obs: Obs
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    valid: BoolArray
    final_obs: Obs
    success: FloatArray


class VectorEnv(Protocol):
    """N environments stepped together, with exact episode ends. Arrays returned are the caller's to keep."""

    @property
    def spec(self) -> EnvSpec: ...
    @property
    def num_envs(self) -> int: ...
    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start all episodes; one seed for each env."""
        ...

    def step(self, action: FloatArray) -> StepResult:
        """Take one step with env-space actions [N, A]."""
        ...

    def restart(self, rows: BoolArray) -> Obs:
        """Abandon the episodes of the chosen rows [N] and start new ones; returns obs for all N rows.

        Called for envs that went non-finite: their rows from the episode's start are no experience.
        """
        ...

    def close(self) -> None: ...


class EnvironmentPlugin(Protocol):
    """Entry point group `clawq.environments`. A module, class or instance with these members.

    `Options` is a frozen pydantic model; `make` builds N envs, and may import a simulator; `render` builds one env
    whose `frame()` gives uint8 [H, W, 3] (or raises UserError saying that this plugin cannot draw).
    """

    Options: type[Any]

    def make(self, options: Any, num_envs: int) -> VectorEnv: ...
    def make_rendered(self, options: Any) -> "RenderedEnv": ...


class GoalReward(Protocol):
    """What an environment gives for goals: the reward of a step that achieved one goal while another was desired.

    An environment plugin for goal environments has `make_goals(options) -> GoalReward`; hindsight needs it.
    """

    def reward(self, achieved: FloatArray, desired: FloatArray) -> FloatArray:
        """Rewards [B] for goals [B, ...]."""
        ...

    def terminated(self, achieved: FloatArray, desired: FloatArray) -> BoolArray:
        """Whether that ends the episode, [B]."""
        ...


class RenderedEnv(VectorEnv, Protocol):
    """A VectorEnv of one env that can be drawn."""

    def frame(self) -> Array:
        """uint8 [H, W, 3]."""
        ...


# --- algorithms ---------------------------------------------------------------------------------------------------


#: Weights version of demonstrations: newer than any learner's, so that they have no policy lag.
DEMONSTRATED = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sampled n-step transitions, tensors on the learner's device.

    Attributes:
        obs: key -> [B, ...].
        action: float32 [B, A], policy space.
        reward: float32 [B], discounted sum over the n steps really taken.
        discount: float32 [B], γ^k·(1 − terminated) with k the steps really taken.
        next_obs: key -> [B, ...], the observation to bootstrap from.
        importance_weight: float32 [B], 1 for uniform sampling.
        row: int64 [B], absolute rows of the ring (of demonstrations: of theirs), for priorities.
        weights_version: int64 [B], the version under which each row was made (for policy lag); of demonstrations
            DEMONSTRATED.
        extras: stored per-step policy outputs.
        made_by: `weights_version` on the host, int64 numpy [B]: asking for it waits for no GPU; None = not there.
    """

    obs: Mapping[str, Any]
    action: Any
    reward: Any
    discount: Any
    next_obs: Mapping[str, Any]
    importance_weight: Any
    row: Any
    weights_version: Any
    extras: Mapping[str, Any]
    made_by: Any = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceBatch(Batch):
    """B sampled sequences of up to L steps in a row of one env, for recurrent policies (see replay.sequences).

    The axes are [L, B]: time first. `obs`, `action`, `reward`, `discount`, `next_obs`, `weights_version` and `extras`
    are as in Batch, of one step each, with L before B; `next_obs[l]` is `obs[l + 1]`. `importance_weight` and `row` (of
    the first step) stay [B]. Behind the end of a sequence the last obs is repeated, and all else is 0. `made_by` has
    the versions of the steps in `mask` alone, in no order that means anything.

    Attributes:
        mask: bool [L, B]: learn from this step (it happened, and it is no burn-in).
        steps: int64 [B], how many steps really happened, burn-in included, 1..L.
    """

    mask: Any
    steps: Any


class Algorithm(Protocol):
    """The learner's side of an algorithm: networks, optimisers, normaliser."""

    @property
    def td_error(self) -> Any:
        """float32 [B], on the learner's device: temporal-difference errors of the last batch, for priorities.

        None if the algorithm has no such thing; prioritised replay is refused then.
        """
        ...

    def observe(self, obs: Mapping[str, Any], valid: Any) -> None:
        """Update running statistics from rows [R, ...] committed to the ring, each valid row once."""
        ...

    def step(self, batch: Batch, progress: float) -> Metrics:
        """One update. `progress` is the spent share of the budget, 0..1 (for schedules).

        Raises NonFiniteUpdate with all weights unchanged when a loss or gradient norm is not finite.
        """
        ...

    def weights(self) -> dict[str, Any]:
        """What actors need, normaliser included: name -> tensor. The tensors are copies, on the CPU."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit: networks, targets, optimisers, normaliser, counters, RNG."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Explorer(Protocol):
    """What an actor gives its policy to explore with: the run's `exploration`, on the actor's own seeded numbers.

    All actions are float32 [N, A] in policy space, [-1, 1].
    """

    def perturb(self, action: FloatArray) -> FloatArray:
        """These actions with the run's noise, a share of them scattered: for a policy that does not explore itself."""
        ...

    def normal(self) -> FloatArray:
        """Standard normal numbers [N, A], for a policy that samples its actions."""
        ...

    def scatter(self, action: FloatArray) -> FloatArray:
        """These actions, the run's share of them (`random_share`) replaced by uniform ones."""
        ...


class Policy(Protocol):
    """The actor's copy of a policy. Used under `torch.inference_mode`."""

    def load(self, weights: Mapping[str, Any]) -> None:
        """Adopt published weights: name -> numpy array or tensor. Raises WeightsCorrupt if names or shapes differ."""
        ...

    def act(self, obs: Obs) -> FloatArray:
        """The best actions [N, A] that it knows, in policy space; the same for the same weights and observations."""
        ...

    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        """Actions [N, A] to execute while learning, in policy space, and the extras to store.

        All randomness comes from the explorer, so that an actor's seed fixes what it does.
        """
        ...


#: What an algorithm plugin that names no `samplers` learns from.
OFF_POLICY = ("uniform", "prioritized")


class AlgorithmPlugin(Protocol):
    """Entry point group `clawq.algorithms`.

    A plugin may have `samplers`, a tuple of the values of `replay.sampler` that it can learn from: `fifo` for one that
    is on-policy, `sequence` for one that is recurrent (its `step` is given a SequenceBatch). Without it: OFF_POLICY.

    A plugin whose `step` needs what its policy put beside each action (log-probabilities, values) has `extras(spec,
    options)`: name -> ArraySpec, without T and N. They come in `Batch.extras`. Its actors never act at random before
    the first update, but under the first weights: every env step has its extras.
    """

    Options: type[Any]

    def make_algorithm(self, spec: EnvSpec, options: Any, device: str, seed: int) -> Algorithm: ...
    def make_policy(self, spec: EnvSpec, options: Any) -> Policy: ...


# --- transport ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Control:
    """The control record of a run, as actors see it.

    Attributes:
        head: newest weights version, 0 if none was published.
        stop: the run is over; actors end.
        window_bytes: how many unread bytes a slot's stream may hold before its actor waits.
        config_epoch: grows when the run's desired state changes.
        required: names of the required readers; what the slowest of them has not taken over is unread.
    """

    head: int
    stop: bool
    window_bytes: int
    config_epoch: int
    required: tuple[str, ...] = ("learner",)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One published version: tensors as numpy arrays, and what is known of them.

    Attributes:
        version: only ever grows.
        arrays: name -> array.
        updates: updates made by the learner when it published; 0 means untrained: explore at random.
        metadata: free JSON-able facts (env steps, time, tags).
    """

    version: int
    arrays: dict[str, Array]
    updates: int
    metadata: dict[str, Any]


@runtime_checkable
class FragmentSink(Protocol):
    """Where an actor's sender thread puts encoded fragments: a slot's stream, or its in-memory twin."""

    @property
    def epoch(self) -> int:
        """The epoch taken with the slot's claim."""
        ...

    def send(self, seq: int, payload: bytes | bytearray | memoryview) -> Control | None:
        """Append one entry and bring back the control record (None if there is none). Blocks at most its timeout.

        Raises StoreUnavailable or StoreFull (retry the same seq later), StreamRejected (new epoch), ClaimLost.
        """
        ...

    def poll(self) -> Control | None:
        """The control record alone; renews the claim."""
        ...

    def unread_bytes(self) -> int:
        """Bytes sent by this epoch that the slowest required reader has not taken over, as of the last send or poll."""
        ...


class Stream(NamedTuple):
    """One stream of a slot, from its first writer until it is swept away.

    Attributes:
        born: the epoch with which it began; 0 = not known.
        before: entries that the slot had in streams before it, by their ordinals.
    """

    born: int = 0
    before: int = 0


#: The stream of a slot that never had another, or of which nothing is known.
FIRST = Stream()
#: A stream that was swept away by now, whichever it was.
OVER = Stream(-1, 2**62)
#: A stream that went away with its server, whichever it was: what is left of it, an archive has.
BYGONE = Stream(-2, 2**62)


@dataclass(frozen=True, slots=True)
class Slots:
    """Which streams there are, as a reader found them.

    Attributes:
        epochs: slot -> epoch of its present writer.
        born: slot -> epoch with which its stream began.
        swept: entries of all streams that were swept away.
        first: the reader begins with this look.
    """

    epochs: Mapping[str, int]
    born: Mapping[str, int]
    swept: int
    first: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One raw stream entry: where it was and what it held.

    Or the word that entries went away before their reader came to them: then `missed` says how many, up to and with
    this id, and the payload is empty.

    Attributes:
        slot: whose stream.
        epoch: first half of the id.
        seq: second half of the id.
        payload: the encoded fragment.
        ordinal: its number among all entries that the slot's stream ever had, counted from 1; 0 = not known.
        missed: entries that were trimmed unread.
        stream: in which of the slot's streams it is.
    """

    slot: str
    epoch: int
    seq: int
    payload: bytes
    ordinal: int = 0
    missed: int = 0
    stream: Stream = FIRST


@dataclass(frozen=True, slots=True)
class Vanished:
    """A slot's stream went away with its server; what its reader found instead.

    Attributes:
        read: entries of the present stream that were read already.
        lost: entries of the one before that nobody had read, as far as is known.
        cursor: id after which reading goes on.
        stream: which stream it is there; FIRST where the slot is not registered.
    """

    read: int
    lost: int
    cursor: str
    stream: Stream = FIRST


class FragmentSource(Protocol):
    """Where the learner's consumer reads entries from: all slot streams of a run, or their twin."""

    def read(self, timeout_s: float) -> list[Entry]:
        """Entries after the cursors, oldest first per slot; an empty list on timeout."""
        ...

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry that `read` returned."""
        ...

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Mirror how far this reader has taken entries over, so that actors can be paced."""
        ...


class WeightsSource(Protocol):
    """Where actors and evaluators get weights."""

    def fetch_newer(self, than: int) -> Weights | None:
        """The head if its version is larger than `than`, verified; else None."""
        ...

    def fetch(self, version: int) -> Weights:
        """That version, or WeightsGone."""
        ...


class MetricWriter(Protocol):
    """Entry point group `clawq.metric_writers`: somewhere the learner's metrics go."""

    def write(self, step: int, wall_s: float, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


__all__ = [
    "BYGONE",
    "DEMONSTRATED",
    "FIRST",
    "OFF_POLICY",
    "OVER",
    "Algorithm",
    "AlgorithmPlugin",
    "Batch",
    "Control",
    "Entry",
    "EnvironmentPlugin",
    "Explorer",
    "Fragment",
    "FragmentSink",
    "FragmentSource",
    "GoalReward",
    "MetricWriter",
    "Policy",
    "RenderedEnv",
    "SequenceBatch",
    "Slots",
    "StepResult",
    "Stream",
    "Vanished",
    "VectorEnv",
    "Weights",
    "WeightsSource",
]
