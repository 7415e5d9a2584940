"""No test forgets `check_valid()`: while `checked` is in force, every mutation is followed by it.

Ring, samplers, sum tree, limiter and staging are checked after each call of a method that changes them; when one of
them changes another, all are checked after the outermost call, also if it ended with an error of its own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import pytest

#: Class -> its methods that change something.
MUTATIONS = {
    "clawq.replay.ring:ReplayRing": ("insert", "void", "mask", "mask_fragments"),
    "clawq.replay.sum_tree:SumTree": ("set", "raise_to"),
    "clawq.replay.samplers:UniformSampler": ("draw", "load_state_dict"),
    "clawq.replay.prioritized:PrioritizedSampler": ("draw", "learned", "load_state_dict"),
    "clawq.replay.fifo:FifoSampler": ("draw", "load_state_dict"),
    "clawq.replay.rate_limiter:Unlimited": ("inserted", "sampled", "excuse", "rebase", "retune", "load_state_dict"),
    "clawq.replay.rate_limiter:RateLimiter": ("retune", "load_state_dict"),
    "clawq.replay.rounds:Rounds": ("open", "add", "close"),
    "clawq.replay.staging:Staging": ("put", "drop", "take", "commit"),
}


class _Calls(threading.local):
    """Of one thread: how deep it is in mutations, and what they changed."""

    depth = 0

    def __init__(self) -> None:
        self.touched: list[Any] = []


@contextmanager
def checked() -> Iterator[None]:
    """Check everything after each of its mutations, as long as this lasts."""
    calls = _Calls()
    with pytest.MonkeyPatch.context() as patch:
        for place, names in MUTATIONS.items():
            module, _, owner = place.partition(":")
            kind = getattr(import_module(module), owner)
            for name in names:
                if name in vars(kind):
                    patch.setattr(kind, name, _followed_by_check(vars(kind)[name], calls))
        yield


def _followed_by_check(method: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        calls.touched.append(self)
        calls.depth += 1
        try:
            return method(self, *args, **named)
        finally:
            calls.depth -= 1
            if calls.depth == 0:
                touched = {id(one): one for one in calls.touched}
                calls.touched.clear()
                for one in touched.values():
                    ok, why = one.check_valid()
                    assert ok, f"{type(one).__name__}.{method.__name__}: {why}"

    return call
