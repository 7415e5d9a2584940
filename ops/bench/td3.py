"""How long a TD3 update takes on one CPU thread, beside the same update written plainly with torch.nn and autograd.

    python ops/bench/td3.py [rounds]

HandReach sizes: observation 78, action 20, 256x256, B = 256. Prints CPU milliseconds of the thread (what counts on a
busy machine), median and least of interleaved rounds, and how many times faster than the plain one. Compare ratios of
one run only: the same machine was seen to be 1.7 times slower when its neighbours were busy.
"""

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from clawq.algorithms.td3 import Td3Options, plugin
from clawq.core import Batch
from clawq.specs import ActionSpec, ArraySpec, EnvSpec

ROWS, ACTIONS, HIDDEN, STEPS = 256, 20, 256, 40
KEYS = ("observation", "desired_goal")
SPEC = EnvSpec(
    "hands:HandReachDense-v3",
    {"observation": ArraySpec((63,)), "achieved_goal": ArraySpec((15,)), "desired_goal": ArraySpec((15,))},
    ActionSpec((-1.0,) * ACTIONS, (1.0,) * ACTIONS),
    KEYS,
    KEYS,
)


def make_batch() -> Batch:
    """Random numbers."""

    def obs() -> dict[str, Tensor]:
        return {key: torch.randn(ROWS, *spec.shape) for key, spec in SPEC.obs.items()}

    action, reward = torch.rand(ROWS, ACTIONS) * 2 - 1, torch.randn(ROWS)
    rows, ones = torch.arange(ROWS), torch.ones(ROWS)
    return Batch(obs(), action, reward, torch.full((ROWS,), 0.5), obs(), ones, rows, rows, {})


class PlainTd3:
    """The usual single-file TD3: two critic networks, autograd, a loop over parameters for the targets."""

    def __init__(self, batch: Batch, **adam: Any) -> None:
        self.obs = torch.cat([batch.obs[key] for key in KEYS], 1)
        self.next_obs = torch.cat([batch.next_obs[key] for key in KEYS], 1)
        self.batch, self.updates = batch, 0
        self.actor = self._network(78, ACTIONS)
        self.critics = nn.ModuleList([self._network(78 + ACTIONS, 1) for _ in range(2)])
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), 1e-3, **adam)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), 1e-3, **adam)

    @staticmethod
    def _network(size_in: int, size_out: int) -> nn.Sequential:
        hidden = [nn.Linear(size_in, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(HIDDEN, size_out))

    def step(self) -> None:
        """One update."""
        self.updates += 1
        with torch.no_grad():
            noise = (torch.randn(ROWS, ACTIONS) * 0.2).clamp(-0.5, 0.5)
            action = (self.target_actor(self.next_obs).tanh() + noise).clamp(-1, 1)
            inputs = torch.cat([self.next_obs, action], 1)
            value = torch.min(*[network(inputs) for network in self.target_critics]).squeeze(1)
            goal = self.batch.reward + self.batch.discount * value
        inputs = torch.cat([self.obs, self.batch.action], 1)
        losses = [functional.mse_loss(network(inputs).squeeze(1), goal) for network in self.critics]
        self._apply(self.critics, self.critic_adam, losses[0] + losses[1])
        if self.updates % 2 == 0:
            inputs = torch.cat([self.obs, self.actor(self.obs).tanh()], 1)
            self._apply(self.actor, self.actor_adam, -self.critics[0](inputs).mean())
            for online, target in ((self.actor, self.target_actor), (self.critics, self.target_critics)):
                for ours, theirs in zip(online.parameters(), target.parameters(), strict=True):
                    theirs.data.mul_(0.99).add_(ours.data, alpha=0.01)

    @staticmethod
    def _apply(module: nn.Module, adam: torch.optim.Adam, loss: Tensor) -> None:
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        loss.item()
        adam.step()


def clawq_step(batch: Batch, fast: bool) -> Callable[[], object]:
    """An update of ours."""
    td3 = plugin.make_algorithm(SPEC, Td3Options(average_decay=0.99, fast_matmul=fast), "cpu", 0)
    td3.observe(batch.obs, torch.ones(ROWS, dtype=torch.bool))
    return lambda: td3.step(batch, 0.1)


def measure(step: Callable[[], object]) -> float:
    """CPU milliseconds of one update."""
    step()
    start = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - start) / STEPS * 1e3


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    batch = make_batch()
    steps: dict[str, Callable[[], object]] = {
        "plain, Adam in a loop": PlainTd3(batch, foreach=False).step,
        "plain, foreach Adam": PlainTd3(batch, foreach=True).step,
        "plain, fused Adam": PlainTd3(batch, fused=True).step,
        "clawq": clawq_step(batch, fast=False),
        "clawq, fast_matmul": clawq_step(batch, fast=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(measure(step))
    slowest = statistics.median(next(iter(taken.values())))
    print(f"load {os.getloadavg()[0]:.1f}")
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:24s} median {median:6.2f} ms   least {min(times):6.2f} ms   {slowest / median:4.2f}x")


if __name__ == "__main__":
    main()
