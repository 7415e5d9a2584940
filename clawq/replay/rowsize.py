"""Bytes of a row of the replay ring; without torch, so that a forecast can be made before anything starts."""

from collections.abc import Mapping

from clawq.specs import ArraySpec, EnvSpec

#: On the learner's device: reward, bootstrap, truncated. On the host: three links, valid.
DEVICE_SCALAR_BYTES, HOST_ROW_BYTES = 4 + 4 + 1, 3 * 4 + 1
#: Bytes of a row beside obs, action, extras.
SCALAR_BYTES = DEVICE_SCALAR_BYTES + HOST_ROW_BYTES


def forecast_bytes(spec: EnvSpec, capacity: int, extras: Mapping[str, ArraySpec] | None = None) -> int:
    """Bytes that a ring of `capacity` rows takes (beside a GPU, HOST_ROW_BYTES of each row are on the host)."""
    obs = sum(one.nbytes for one in spec.obs.values())
    more = sum(one.nbytes for one in (extras or {}).values())
    return capacity * (obs + more + 4 * spec.action.size + SCALAR_BYTES)
