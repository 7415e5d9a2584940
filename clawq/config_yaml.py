"""The YAML side of a configuration: text and overrides in, one plain mapping out, and the way back.

The YAML is 1.2 and safe: `1e-3` is a number, `on` is a word, a key may not stand twice, no tag makes an object. The
mapping holds JSON types only, because a configuration travels as JSON: dates, binary values, non-finite numbers and
keys that are no words are refused. Anchors work; one that contains itself is refused.

What the keys mean is not known here (see clawq.config_file).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from clawq.errors import ConfigError

#: Deepest nesting of a configuration; deeper ones (or anchors that contain themselves) are refused.
MAX_DEPTH = 32


class Mistake(NamedTuple):
    """One mistake: the dotted path of the key, and what is wrong with it."""

    at: str
    text: str

    def __str__(self) -> str:
        return f"{self.at}: {self.text}" if self.at else self.text


def read_yaml(path: Path) -> dict[str, Any]:
    """The file as a mapping of JSON types. Raises ConfigError in plain words for all that can be wrong with a file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(str(path), [f"there is no such file{_neighbours(path)}"]) from error
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 text (byte {error.start}: {error.reason})"]) from error
    try:
        raw = _parse_yaml(text)
    except (YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(str(path), [f"is not valid YAML: {_yaml_problem(error)}"]) from error
    if raw is None:
        raise ConfigError(str(path), ["is empty; the least that a configuration needs is `name` and `environment`"])
    if not isinstance(raw, dict):
        raise ConfigError(str(path), [f"must be a mapping of keys to values at the top, got {_kind(raw)}"])
    plain, mistakes = _plain(raw)
    if mistakes:
        raise ConfigError(str(path), [str(mistake) for mistake in mistakes])
    assert isinstance(plain, dict)
    return plain


def _parse_yaml(text: str) -> Any:
    # pure: the C parser reads YAML 1.1, where `on` is true and 1e-3 a string.
    return YAML(typ="safe", pure=True).load(text)


def set_key(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one key of a mapping whose sections are there, as in a dumped configuration."""
    *sections, last = dotted.split(".")
    at = raw
    for name in sections:
        at = at[name]
    at[last] = value


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> Iterator[Mistake]:
    """Set each `key.path=value` in `raw`, in order, making sections that are absent; yields what could not be set."""
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.split(".")
        if not equals or not all(keys):
            yield Mistake("", f"override {override!r}: must look like key.path=value")
            continue
        try:
            value, mistakes = _plain(_parse_yaml(text), dotted)
        except (YAMLError, RecursionError, ValueError) as error:
            yield Mistake(dotted, f"is not valid YAML: {_yaml_problem(error)}")
            continue
        yield from mistakes
        at: Any = raw
        for depth, key in enumerate(keys[:-1]):
            if at.get(key) is None:
                at[key] = {}
            at = at[key]
            if not isinstance(at, dict):
                yield Mistake(dotted, f"{'.'.join(keys[: depth + 1])} is {_kind(at)}, it has no keys")
                break
        else:
            at[keys[-1]] = value


def _plain(value: Any, at: str = "", depth: int = 0) -> tuple[Any, list[Mistake]]:
    """The value with JSON types only (the configuration travels as JSON), and what is not one."""
    if depth > MAX_DEPTH:
        return None, [Mistake(at, f"is nested deeper than {MAX_DEPTH} levels")]
    mistakes: list[Mistake] = []
    if isinstance(value, dict):
        plain: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                mistakes.append(Mistake(join(at, key), "keys must be words; put it in quotes"))
                continue
            plain[key], found = _plain(item, join(at, key), depth + 1)
            mistakes += found
            if len(mistakes) > MAX_DEPTH:
                break
        return plain, mistakes
    if isinstance(value, list):
        items = [_plain(item, join(at, index), depth + 1) for index, item in enumerate(value)]
        return [item for item, _ in items], [mistake for _, found in items for mistake in found]
    if isinstance(value, float) and not math.isfinite(value):
        return value, [Mistake(at, f"must be a finite number, got {value}")]
    if value is None or isinstance(value, bool | int | float | str):
        return value, []
    return None, [Mistake(at, f"must be a number, a word, a list or a mapping, got {_kind(value)}; put it in quotes")]


def dump_yaml(plain: Mapping[str, Any]) -> str:
    """The mapping as YAML in block style; reading it gives an equal one."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    out = StringIO()
    yaml.dump(dict(plain), out)
    return out.getvalue()


def _neighbours(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    found = sorted(str(file) for file in folder.glob("*.yaml"))[:10]
    return f"; there are {', '.join(found)}" if found else ""


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]


def join(at: str, part: object) -> str:
    """The dotted path of `part` below `at`."""
    return f"{at}.{part}" if at else str(part)


def _kind(value: Any) -> str:
    kinds = {
        dict: "a mapping",
        list: "a list",
        str: "a word",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "nothing",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


__all__ = ["MAX_DEPTH", "Mistake", "apply_overrides", "dump_yaml", "join", "read_yaml", "set_key"]
