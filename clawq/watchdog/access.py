"""As whom the watchdog uses Redis: as user `watchdog` where its environment says so, else as whom it looks after.

Each record names the URLs of its process, which are enough: a worker may take claims of its own slots away, a learner
those of its run (clawq.transport.rights). So a watchdog that `worker start` or `up` brought along needs nothing more.
One that is a service of its own (ops/systemd) can have `watchdog.env` of `clawq redis acl` instead.
"""

import os
from collections.abc import Mapping

from clawq.transport.urls import same_server, user_of

_VARIABLES = ("CLAWQ_BROKER_URL", "CLAWQ_DATA_URL")
_USER = "watchdog"


def own_url(url: str, env: Mapping[str, str] | None = None) -> str:
    """The URL under which that server is used."""
    env = os.environ if env is None else env
    named = (env.get(name, "") for name in _VARIABLES)
    return next((mine for mine in named if user_of(mine) == _USER and same_server(mine, url)), url)


__all__ = ["own_url"]
