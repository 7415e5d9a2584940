"""The Redis of a run: the one that is named somewhere, or two embedded servers that end with us.

The order is configuration, environment, the host's state file; only if nothing is named, servers are started. They are
announced in the state file, so that workers and `clawq status` on this machine find them; where other servers are
announced already, ours stay private to this run and to what it starts.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from clawq.config import Redis
from clawq.errors import StoreUnavailable, UserError
from clawq.state import ServerState, named_urls, resolve_urls, state_dir
from clawq.transport.server import EmbeddedRedis


@dataclass(frozen=True, slots=True)
class Servers:
    """Broker and data server.

    Attributes:
        broker_url: Celery and run specs.
        data_url: streams, weights, control record.
        embedded: our own servers, None if we use others'.
    """

    broker_url: str
    data_url: str
    embedded: EmbeddedRedis | None = None

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that tell our children where Redis is."""
        return {"CLAWQ_BROKER_URL": self.broker_url, "CLAWQ_DATA_URL": self.data_url}

    def check(self) -> None:
        """StoreUnavailable if an embedded server has ended by itself."""
        for process in self.embedded.processes if self.embedded is not None else ():
            if process.poll() is not None:
                raise StoreUnavailable(
                    f"an embedded Redis server ended by itself (status {process.returncode}); what it held is gone. "
                    "The run ends with its last checkpoint; go on from there with --resume and its run folder."
                )


@contextmanager
def servers_for(config: Redis, name: str, owner: str, say: Callable[[str], None]) -> Iterator[Servers]:
    """Servers for a run; embedded ones are stopped afterwards.

    Args:
        config: the run's `redis` section.
        name: of the run; names the folder of the embedded broker's file.
        owner: what asks for them: `up` or `learner`.
        say: one line for people.
    """
    # `clawq up` does not borrow servers of another run: they may end before it does.
    urls = named_urls(config) if owner == "up" else resolve_urls(config)
    if urls is not None:
        yield Servers(*urls)
        return
    folder = state_dir() / "redis" / name
    with EmbeddedRedis.start(folder, config.data_memory_mb) as embedded:
        try:
            announce(embedded, owner, say)
            yield Servers(embedded.broker_url, embedded.data_url, embedded)
        finally:
            ServerState.forget()
    # Everything in it can be derived again; only a crash leaves it behind, for people to look at.
    shutil.rmtree(folder, ignore_errors=True)


def announce(embedded: EmbeddedRedis, owner: str, say: Callable[[str], None]) -> None:
    """Write the state file, unless another live process has its servers there."""
    try:
        ServerState.of(embedded.broker_url, embedded.data_url, owner=owner).write()
    except OSError as error:
        say(f"this run cannot be announced on this machine ({error}); `clawq status` will not find it")
    except UserError:
        say(
            "another Redis of clawq is announced on this machine; this run's own servers stay private to it. To look "
            f"at it: CLAWQ_BROKER_URL='{embedded.broker_url}' CLAWQ_DATA_URL='{embedded.data_url}' clawq status"
        )
