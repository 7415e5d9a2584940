"""Two servers of a test's own, and a home whose commands were told where they are: for whole runs."""

from pathlib import Path
from typing import Any

from books import assert_books_balance
from clawq_process import ROOT, Clawq

from clawq.transport.client import connect
from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis

#: A configuration that learns in seconds.
POINT = str(ROOT / "configs" / "point.yaml")


class Cluster:
    """See the module's text; `close` ends all that was started.

    Args:
        folder: for everything; the runs' folders are below it.

    Attributes:
        servers: broker and data server, of 128 MB.
        home: starts commands.
        data: client of the data server.
        registry: of runs.
    """

    def __init__(self, folder: Path) -> None:
        self.servers = servers = EmbeddedRedis.start(folder / "redis", data_memory_mb=128)
        self.home = Clawq(folder, CLAWQ_BROKER_URL=servers.broker_url, CLAWQ_DATA_URL=servers.data_url)
        self.data: Any = connect(servers.data_url)
        self.registry = RunRegistry(connect(servers.broker_url))

    def record(self, run: str) -> RunRecord:
        """What is registered of a run."""
        record = self.registry.get(run)
        assert record is not None
        return record

    def keys(self, run: str) -> RunKeys:
        """The keys of a run."""
        return self.record(run).keys

    def series(self, run: str, name: str) -> list[float]:
        """All values of a metric so far, one a second."""
        return [float(line[name]) for line in self.home.metrics(run) if line.get(name) is not None]

    def number(self, run: str, name: str) -> float:
        """The newest value of a metric, 0 before there is one."""
        return (self.series(run, name) or [0.0])[-1]

    def stop(self, run: str) -> dict[str, Any]:
        """Stop the run's learner in order; returns what became of all experience, after checking that it adds up."""
        keys = self.keys(run)
        assert self.home.call("learner", "stop", run).status == 0
        return assert_books_balance(self.data, keys, self.home.runs / run)

    def close(self) -> None:
        """End all processes, then the servers."""
        self.home.close()
        self.data.close()
        self.servers.stop()
