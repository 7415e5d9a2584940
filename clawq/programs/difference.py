"""Where two states differ first: nested mappings, sequences, tensors and plain values, compared to the last bit."""

from collections.abc import Mapping
from typing import Any

import torch


def first_difference(was: Any, now: Any, path: str = "") -> str | None:
    """`path: was this, is that` of the first place that differs, None if nothing does. Two nans are the same."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted(was.keys() | now.keys(), key=str):
            if key not in was or key not in now:
                return f"{path}{key}: only in the {'replay' if key in now else 'recording'}"
            found = first_difference(was[key], now[key], f"{path}{key}.")
            if found is not None:
                return found
        return None
    if isinstance(was, list | tuple) and isinstance(now, list | tuple):
        if len(was) != len(now):
            return f"{path.rstrip('.')}: {len(was)} entries, now {len(now)}"
        pairs = enumerate(zip(was, now, strict=True))
        return next(filter(None, (first_difference(a, b, f"{path}{i}.") for i, (a, b) in pairs)), None)
    if isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
        return _tensors(was, now, path.rstrip("."))
    if was == now or (was != was and now != now):
        return None
    return f"{path.rstrip('.')}: was {was!r}, is {now!r}"


def _tensors(was: torch.Tensor, now: torch.Tensor, path: str) -> str | None:
    if was.shape != now.shape or was.dtype != now.dtype:
        return f"{path}: was {was.dtype} {tuple(was.shape)}, is {now.dtype} {tuple(now.shape)}"
    same = was == now
    if was.is_floating_point():
        same |= was.isnan() & now.isnan()
    if bool(same.all()):
        return None
    index = tuple(int(i) for i in torch.nonzero(~same)[0]) if was.dim() else ()
    count = f"{int((~same).sum())} of {was.numel()} numbers"
    return f"{path}: {count}, the first was {was[index].item()!r}, is {now[index].item()!r}"
