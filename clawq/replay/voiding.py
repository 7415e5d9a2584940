"""Notices of void rows that refused fragments brought: kept until the next good fragment of their slot hands them on.

For each slot those of one epoch (rows of an older one are no experience of this actor any more), and of each env the
one that reaches back furthest. They are part of a checkpoint: a notice that is forgotten would leave void rows in use.
"""

from collections.abc import Iterable, Sequence

from clawq.types import FragmentMeta, Voided


class KeptNotices:
    """See the module's text.

    Args:
        state: what `state` gave.
    """

    def __init__(self, state: Iterable[Sequence[str | int]] = ()) -> None:
        #: slot -> epoch, and env -> notice.
        self._kept: dict[str, tuple[int, dict[int, Voided]]] = {}
        for slot, *numbers in state:
            epoch, env, seq, t = map(int, numbers)
            self._kept.setdefault(str(slot), (epoch, {}))[1][env] = Voided(env, seq, t)

    def keep(self, meta: FragmentMeta) -> None:
        """Keep what a refused fragment said."""
        epoch, kept = self._kept.get(meta.slot, (meta.epoch, {}))
        if epoch != meta.epoch:
            kept = {}
        for notice in meta.voided:
            first = kept.get(notice.env, notice)
            kept[notice.env] = min(first, notice, key=lambda one: (one.seq, one.t))
        if kept:
            self._kept[meta.slot] = (meta.epoch, kept)

    def take(self, meta: FragmentMeta) -> tuple[Voided, ...]:
        """What a good fragment hands on; it is kept no longer."""
        epoch, kept = self._kept.pop(meta.slot, (meta.epoch, {}))
        return tuple(kept.values()) if epoch == meta.epoch else ()

    def forget(self, slots: Iterable[str]) -> None:
        """Nobody will hand on those of these slots."""
        for slot in slots:
            self._kept.pop(slot, None)

    def state(self) -> list[list[str | int]]:
        """[slot, epoch, env, seq, t] of each."""
        return [
            [slot, epoch, one.env, one.seq, one.t]
            for slot, (epoch, kept) in self._kept.items()
            for one in kept.values()
        ]
