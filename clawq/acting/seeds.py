"""Seeds of an actor and of each of its envs, from (run seed, slot, incarnation).

Different slots and different incarnations of a slot never share a stream; the same three give the same seeds again, on
any machine. What was used travels in every fragment (`FragmentMeta.seed`).
"""

import hashlib

import numpy as np


def actor_seed(run_seed: int, slot: str, incarnation: int) -> int:
    """The one seed of an actor, 0 <= seed < 2^63.

    Args:
        run_seed: `RunConfig.seed`.
        slot: name of the slot.
        incarnation: 0 for the slot's first actor in this run; any other number for a later one.
    """
    digest = hashlib.blake2b(slot.encode(), digest_size=8).digest()
    entropy = [run_seed, int.from_bytes(digest, "little"), incarnation]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """One seed for each env, all different, from the actor's seed."""
    children = np.random.SeedSequence(seed).spawn(num_envs)
    return [int(child.generate_state(1, np.uint64)[0] >> 1) for child in children]


def noise_generator(seed: int) -> np.random.Generator:
    """The random numbers of exploration, independent of those of the envs."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2**32 - 1,)))


__all__ = ["actor_seed", "env_seeds", "noise_generator"]
