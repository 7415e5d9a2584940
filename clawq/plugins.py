"""Plugins: installed entry points, found by name and loaded when the name is used.

A plugin is an entry point in one of the groups below; clawq's own parts come in through the same doors. Looking a name
up imports nothing; `load` imports exactly the plugin that was named, so a broken neighbour stops nobody. Two
distributions may register the same name: that is an error only for who uses it, and `clawq plugins list` shows it.

What this module does not do: it has no policy and no order, runs no hooks, and accepts no import path from a
configuration or from the wire. A run names installed entry points, nothing else.

A whole plugin, in the `pyproject.toml` of any installed package:

    [project.entry-points."clawq.environments"]
    cartpole = "my_package.cartpole:plugin"
"""

import difflib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from clawq.errors import DuplicatePlugin, PluginError, PluginLoadFailed, PluginNotFound

#: group -> what one of its plugins is. The entry point group is `clawq.<group>`.
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "environments": "environment (clawq.core.EnvironmentPlugin)",
        "algorithms": "algorithm (clawq.core.AlgorithmPlugin)",
        "tasks": "Celery task (clawq.control.app)",
        "metric_writers": "metric writer (clawq.core.MetricWriter, made from the run's folder)",
        "commands": "command of the clawq command line (a click command)",
    }
)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered name, not loaded.

    Attributes:
        group: a key of GROUPS.
        name: the name that configurations use.
        distribution: name and version of the installed distribution, as `clawq-hands 0.1.0`.
        target: what is imported, as `package.module:attribute`.
        duplicate: another distribution registers the same name, so it cannot be used.
    """

    group: str
    name: str
    distribution: str
    target: str
    duplicate: bool


def installed(group: str) -> list[Plugin]:
    """All registered plugins of a group, sorted by name, duplicates included. Imports none of them."""
    return [
        Plugin(group, name, _distribution(point), point.value, duplicate=len(points) > 1)
        for name, points in sorted(_points(group).items())
        for point in points
    ]


def names(group: str) -> list[str]:
    """The names registered in a group, sorted. Imports none of them."""
    return sorted(_points(group))


def load(group: str, name: str) -> Any:
    """Import and return the plugin registered under that name.

    Raises:
        PluginNotFound: nothing installed has that name; the text lists what is there and the nearest name.
        DuplicatePlugin: several distributions register it; the text names them.
        PluginLoadFailed: importing it failed; the original error is the cause.
    """
    by_name = _points(group)
    points = by_name.get(name, [])
    if not points:
        raise PluginNotFound(_not_found(group, name, sorted(by_name)))
    if len(points) > 1:
        owners = " and ".join(_distribution(point) for point in points)
        raise DuplicatePlugin(f"{group}: the name {name!r} is registered by {owners}; uninstall one of them")
    [point] = points
    try:
        return point.load()
    # A module may even call sys.exit() when imported; that must not end us without a word.
    except (Exception, SystemExit) as error:
        raise PluginLoadFailed(
            f"{group}: the plugin {name!r} ({point.value} of {_distribution(point)}) could not be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _points(group: str) -> dict[str, list[EntryPoint]]:
    if group not in GROUPS:
        raise PluginError(f"there is no plugin group {group!r}; the groups are {', '.join(GROUPS)}")
    by_name: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in entry_points(group=f"clawq.{group}"):
        by_name[point.name].append(point)
    return dict(by_name)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed distribution"


def _not_found(group: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(known) if known else "none"
    return f"{group}: no installed plugin is named {name!r}; installed: {listed}.{hint}"


__all__ = ["GROUPS", "Plugin", "installed", "load", "names"]
