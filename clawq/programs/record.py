"""`python -m clawq.programs.record`: the trained policy beside the untrained one, as an animation.

Both play the same episodes, from the same seeds, without exploration. Drawn headless in a process of its own; where
nothing can be drawn the answer is one line that says what to install, and nobody's run is harmed.

    request   {"run": {...}, "trained": file or version, "untrained": the same or absent, "out": file,
               "episodes", "seed", "data_url" (for versions)}
    answer    {"file", "frames", "episodes", "returns": {"trained": [...], "untrained": [...]}, "seconds"}
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from clawq.config import RunConfig
from clawq.core import Policy, RenderedEnv
from clawq.errors import UserError
from clawq.plugins import load
from clawq.programs.acting import check_spec
from clawq.programs.actor import limit_threads
from clawq.programs.animation import FrameWriter, open_animation
from clawq.programs.evaluate import read_weights
from clawq.programs.policy_loader import make_policy
from clawq.programs.request import Answer, answer_request
from clawq.specs import EnvSpec
from clawq.types import Array

#: Pictures in one second of the animation. Half of the hands' 25 control steps: every second step is shown.
FRAMES_PER_S = 12.5
STEPS_PER_FRAME = 2
#: How long the last picture of an episode stays, in pictures.
HOLD = 8
#: Height of the line of text above each picture, pixels.
BAND = 26


@dataclass
class Side:
    """One of the players that are shown side by side."""

    label: str
    env: RenderedEnv
    policy: Policy
    returns: list[float] = field(default_factory=list)
    picture: Array | None = None
    over: bool = False
    success: float = math.nan

    def begin(self, seed: int) -> None:
        """Start an episode."""
        self._obs = self.env.reset([seed])
        self.returns.append(0.0)
        self.over, self.success = False, math.nan
        self._draw()

    def step(self, draw: bool) -> None:
        """One step; an episode that is over keeps its last picture."""
        if self.over:
            return
        action = self.policy.act(self._obs)
        result = self.env.step(self.env.spec.action.to_env(action))
        self.returns[-1] += float(result.reward[0])
        self.success = float(result.success[0])
        self._obs = result.obs
        self.over = bool(result.terminated[0] | result.truncated[0])
        # Once it is over the env shows its next episode already: the picture before is the last one.
        if draw and not self.over:
            self._draw()

    def shown(self) -> Array:
        """The picture with its line of text, uint8 [H, W, 3]."""
        assert self.picture is not None
        note = f"{self.label}   return {self.returns[-1]:.2f}" + ("   reached" if self.success == 1.0 else "")
        return captioned(self.picture, note)

    def _draw(self) -> None:
        self.picture = self.env.frame()


def record(request: dict[str, Any]) -> Answer:
    """Answer a recording request (see the module's text).

    Raises:
        UserError: nothing can be drawn here, or the request makes no sense.
        WeightsGone, WeightsCorrupt: the weights cannot be had.
    """
    started_s = time.monotonic()
    if "out" not in request:
        raise UserError("the request must say which file to write: out")
    sides = [_side(request, label) for label in ("untrained", "trained") if request.get(label) is not None]
    if not sides:
        raise UserError("the request must say whose weights to show: trained (and untrained)")
    out, first = Path(request["out"]), int(request.get("seed", 0))
    seeds = range(first, first + int(request.get("episodes", 3)))
    # Written beside the target and moved there: whoever opens the target finds a whole animation.
    temporary = out.with_name(f".{out.stem}.part{out.suffix}")
    writer = open_animation(temporary, FRAMES_PER_S)
    try:
        frames = play(sides, seeds, writer)
        writer.close()
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
        for side in sides:
            side.env.close()
    return {
        "file": str(out),
        "frames": frames,
        "episodes": len(seeds),
        "returns": {side.label: [round(value, 4) for value in side.returns] for side in sides},
        "seconds": round(time.monotonic() - started_s, 3),
    }


def play(sides: Sequence[Side], seeds: Sequence[int], writer: FrameWriter) -> int:
    """Play one episode from each seed on all sides at once and write the pictures; returns how many."""
    import torch

    frames = 0
    with torch.inference_mode():
        for seed in seeds:
            for side in sides:
                side.begin(seed)
            step = 0
            while not all(side.over for side in sides):
                if step % STEPS_PER_FRAME == 0:
                    writer.add(beside([side.shown() for side in sides]))
                    frames += 1
                step += 1
                for side in sides:
                    side.step(draw=step % STEPS_PER_FRAME == 0)
            for _ in range(HOLD):
                writer.add(beside([side.shown() for side in sides]))
            frames += HOLD
    return frames


def beside(pictures: Sequence[Array]) -> Array:
    """Pictures of one height side by side, sizes made even (video codecs want that)."""
    joined = np.concatenate(pictures, axis=1)
    return joined[: joined.shape[0] // 2 * 2, : joined.shape[1] // 2 * 2]


def captioned(picture: Array, text: str) -> Array:
    """The picture [H, W, 3] with a line of text above it: [H + BAND, W, 3]."""
    band = Image.new("RGB", (picture.shape[1], BAND), (24, 26, 31))
    ImageDraw.Draw(band).text((8, 5), text, fill=(235, 235, 235), font=ImageFont.load_default(14))
    return np.concatenate([np.asarray(band), picture])


def _side(request: dict[str, Any], label: str) -> Side:
    config, spec = RunConfig.model_validate(request["run"]["config"]), EnvSpec.from_json(request["run"]["spec"])
    plugin = load("environments", config.environment.name)
    if not hasattr(plugin, "make_rendered"):
        raise UserError(
            f"the environment plugin {config.environment.name!r} cannot draw: it has no make_rendered(options). Add "
            "one (it gives one env with `frame`, see clawq.core.RenderedEnv), or set record.animation: false"
        )
    env: RenderedEnv = plugin.make_rendered(plugin.Options.model_validate(config.environment.options))
    check_spec(env, spec)
    policy = make_policy(config, spec)
    policy.load(read_weights(request, request[label]).arrays)
    return Side(label, env, policy)


if __name__ == "__main__":
    limit_threads()
    answer_request(record)
