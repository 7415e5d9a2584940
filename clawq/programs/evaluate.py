"""`python -m clawq.programs.evaluate`: how good is one weights version?

The deterministic policy of exactly that version, its normaliser frozen as it was published, on fixed seeds: episode i
of any evaluation starts from seed + i, so that two evaluations differ only by their weights. It runs in a process of
its own and never holds training up.

    request   {"run": {"id", "tag", "config", "spec"}, "data_url", "version", "episodes", "seed"}
              or, instead of data_url and version, {"weights": file}; "out": file to write the answer to as well
    answer    {"version", "updates", "episodes", "mean_return", "std_return", "success", "mean_length", "seconds"}
              (`success` is null where the environment does not report it)
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clawq.config import RunConfig
from clawq.core import Policy, VectorEnv, Weights
from clawq.errors import ActorFailed, WeightsCorrupt
from clawq.programs.actor import limit_threads
from clawq.programs.request import Answer, answer_request
from clawq.specs import EnvSpec

#: Envs that an evaluation steps together at most.
MAX_ENVS = 10


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One evaluated episode: return, length in env steps, and success (nan where it is not reported)."""

    episode_return: float
    length: int
    success: float


def evaluate(request: dict[str, Any]) -> Answer:
    """Answer an evaluation request (see the module's text).

    Raises:
        WeightsGone: that version is not kept any more.
        SpecMismatch: this machine's environment is not the run's.
    """
    from clawq.programs.acting import make_env
    from clawq.programs.policy_loader import make_policy

    started_s = time.monotonic()
    config, spec = RunConfig.model_validate(request["run"]["config"]), EnvSpec.from_json(request["run"]["spec"])
    weights = read_weights(request, request.get("weights", request.get("version")))
    episodes, seed = int(request["episodes"]), int(request["seed"])
    env = make_env(config, spec, min(MAX_ENVS, episodes))
    try:
        policy = make_policy(config, spec)
        policy.load(weights.arrays)
        results = run_evaluation(env, policy, [seed + i for i in range(episodes)])
    finally:
        env.close()
    answer = {
        "version": weights.version,
        "updates": weights.updates,
        "episodes": episodes,
        **summarise(results),
        "seconds": round(time.monotonic() - started_s, 3),
    }
    if request.get("out"):
        Path(request["out"]).write_text(json.dumps(answer) + "\n", encoding="utf-8")
    return answer


def run_evaluation(env: VectorEnv, policy: Policy, seeds: Sequence[int]) -> list[EpisodeResult]:
    """One episode from each seed with the deterministic policy, in the order of the seeds.

    Episodes run N at a time, all reset together; an env that is through idles until the others are.

    Raises:
        ActorFailed: an episode showed something that is not finite.
    """
    import torch

    results: list[EpisodeResult] = []
    with torch.inference_mode():
        for first in range(0, len(seeds), env.num_envs):
            results += _run_together(env, policy, list(seeds[first : first + env.num_envs]))
    return results


def summarise(results: Sequence[EpisodeResult]) -> dict[str, float | None]:
    """Mean and standard deviation of the returns, success rate, mean length."""
    returns = np.array([result.episode_return for result in results], np.float64)
    success = np.array([result.success for result in results], np.float64)
    reported = success[~np.isnan(success)]
    return {
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "success": float(reported.mean()) if len(reported) else None,
        "mean_length": float(np.mean([result.length for result in results])),
    }


def read_weights(request: dict[str, Any], source: str | int | None) -> Weights:
    """Weights from a safetensors file, or the version of that number from the run's data Redis.

    Raises:
        WeightsGone, WeightsCorrupt: they cannot be had.
    """
    if isinstance(source, str):
        return weights_from_file(Path(source))
    from clawq.transport.client import connect
    from clawq.transport.keys import RunKeys
    from clawq.transport.weights import WeightsReader

    reader = WeightsReader(connect(request["data_url"]), RunKeys(request["run"]["tag"]))
    return reader.fetch(int(source) if source is not None else reader.head())


def weights_from_file(path: Path) -> Weights:
    """Weights kept as a safetensors file; version and updates are 0, the file does not know them."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return Weights(0, load_file(path), 0, {"file": str(path)})
    except (OSError, SafetensorError) as error:
        raise WeightsCorrupt(f"the weights in {path} cannot be read: {error}") from error


def _run_together(env: VectorEnv, policy: Policy, seeds: list[int]) -> list[EpisodeResult]:
    n, count = env.num_envs, len(seeds)
    returns, lengths = np.zeros(n), np.zeros(n, np.int64)
    success = np.full(n, math.nan)
    open_rows = np.arange(n) < count
    # Envs without an episode of their own only fill up the batch.
    obs = env.reset(seeds + seeds[:1] * (n - count))
    while open_rows.any():
        action = policy.act(obs)
        result = env.step(env.spec.action.to_env(action))
        counted = open_rows & result.valid
        if not np.isfinite(result.reward[counted]).all():
            raise ActorFailed("the evaluation stopped: an env gave a reward that is not finite")
        returns[counted] += result.reward[counted]
        lengths[counted] += 1
        ended = counted & (result.terminated | result.truncated)
        success[ended] = result.success[ended]
        open_rows &= ~ended
        obs = result.obs
    return [EpisodeResult(float(returns[i]), int(lengths[i]), float(success[i])) for i in range(count)]


if __name__ == "__main__":
    limit_threads()
    answer_request(evaluate)
