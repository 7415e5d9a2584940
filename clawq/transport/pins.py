"""Pinned weights versions: kept under a name, whatever is published later.

Anybody who needs a version to stay (an evaluation that is about to start, the best so far) pins it; publishing removes
only versions that are neither new nor pinned. No claim is needed: a pin changes nothing that others read.
"""

from typing import Any

import redis

from clawq.errors import WeightsGone
from clawq.transport.claims import watched
from clawq.transport.client import translated
from clawq.transport.keys import RunKeys
from clawq.transport.texts import parse_whole, readable


class Pins:
    """The pins of a run.

    Args:
        client: of the data server.
        keys: of the run.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._keys = keys

    def pin(self, version: int, tag: str) -> None:
        """Keep a version under a name (which moves if it was used).

        Raises:
            WeightsGone: it is not kept any more.
        """

        def once(pipe: Any) -> bool:
            if not pipe.exists(self._keys.weights(version)):
                raise WeightsGone(f"weights version {version} cannot be pinned: it is not kept any more")
            pipe.multi()
            pipe.hset(self._keys.pins, tag, version)
            pipe.execute()
            return True

        watched(self._client, (self._keys.weights(version),), once)

    def unpin(self, tag: str) -> None:
        """Forget a name; its version goes with the next publish, unless it is new or has another name."""
        with translated(self._client):
            self._client.hdel(self._keys.pins, tag)

    def all(self) -> dict[str, int]:
        """Tag -> pinned version; what is no version is left out."""
        with translated(self._client):
            return readable(self._client.hgetall(self._keys.pins), parse_whole)


__all__ = ["Pins"]
