"""Builds a policy in the background: importing torch takes seconds in which the envs can already run.

`start` begins; `ready` says whether `get` would return at once. A failure is raised by `get`, in the caller's thread.
"""

import os
import threading

from clawq.config import RunConfig
from clawq.core import Policy
from clawq.plugins import load
from clawq.specs import EnvSpec


class PolicyLoader:
    """The policy of one run, once it is needed.

    Args:
        config: names the algorithm and its options.
        spec: the env spec.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec) -> None:
        self._config, self._spec = config, spec
        self._policy: Policy | None = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if that has not been done."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._build, name="policy", daemon=True)
                self._thread.start()

    def ready(self) -> bool:
        """Begin if need be; True once the policy is there (or building it has failed)."""
        self.start()
        return self._thread is not None and not self._thread.is_alive()

    def get(self) -> Policy:
        """The policy; waits for it."""
        self.start()
        assert self._thread is not None
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._policy is not None
        return self._policy

    def _build(self) -> None:
        try:
            self._policy = make_policy(self._config, self._spec)
        except BaseException as error:  # raised again by get()
            self._failure = error


def make_policy(config: RunConfig, spec: EnvSpec) -> Policy:
    """The policy that a configuration names."""
    use_threads()
    plugin = load("algorithms", config.algorithm.name)
    policy: Policy = plugin.make_policy(spec, plugin.Options.model_validate(config.algorithm.options))
    return policy


def use_threads() -> None:
    """Import torch and hold it to CLAWQ_THREADS threads (default 1)."""
    from clawq.programs.arithmetic import set_up_torch

    set_up_torch(int(os.environ.get("CLAWQ_THREADS", "1")))
