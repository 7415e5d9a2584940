"""How an exec'ed program ended badly: one word to count it under, one sentence, the end of its log."""

from clawq.errors import ActorFailed


class Failure(ActorFailed):
    """The bad end of an actor or another program.

    Attributes:
        kind: one word: `died`, `stall`, `overrun`, `late`, `protocol`, `timeout`, `stopped`, or the program's own.
        reason: one sentence.
        slot: where, if it was an actor.
    """

    slot = ""

    def __init__(self, kind: str, reason: str, log_tail: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__((reason or kind) + (f"\n--- end of its log ---\n{log_tail}" if log_tail else ""))


__all__ = ["Failure"]
