"""The YAML side of a configuration: text and overrides in, one plain mapping out, and the way back.

The YAML is 1.2 and safe: `1e-3` is a number, `on` is a word, a key may not stand twice, no tag makes an object. The
mapping holds JSON types only, because a configuration travels as JSON: dates, binary values, non-finite numbers and
keys that are no words are refused. Anchors work; one that contains itself is refused. So is what is larger than any
configuration, before anything is made of it: a few lines of anchors can stand for more values than memory has room for.

What the keys mean is not known here (see clawq.config_file).
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from clawq.errors import ConfigError

#: Deepest nesting of a configuration; deeper ones (or anchors that contain themselves) are refused.
MAX_DEPTH = 32
#: Longest text of a configuration, bytes, and the most characters and values that its anchors may make of it.
MAX_BYTES, MAX_EXPANDED = 40_000, 400_000
#: Whole numbers stay below this.
_LARGEST = 2**63
_BRACKET = re.compile(r"[\[\]{}]")


class Mistake(NamedTuple):
    """One mistake: the dotted path of the key, and what is wrong with it."""

    at: str
    text: str

    def __str__(self) -> str:
        return f"{self.at}: {self.text}" if self.at else self.text


def read_yaml(path: Path) -> dict[str, Any]:
    """The file as a mapping of JSON types. Raises ConfigError in plain words for all that can be wrong with a file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(str(path), [f"is longer than {MAX_BYTES} bytes; no configuration is"])
        return mapping_of(content.decode("utf-8-sig"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(str(path), [f"there is no such file{_neighbours(path)}"]) from error
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 text (byte {error.start}: {error.reason})"]) from error


def mapping_of(text: str, source: str) -> dict[str, Any]:
    """The text as a mapping of JSON types; ConfigError for `source` otherwise."""
    try:
        raw = _parse_yaml(text)
    except (YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(source, [f"is not valid YAML: {_yaml_problem(error)}"]) from error
    if raw is None:
        raise ConfigError(source, ["is empty; the least that a configuration needs is `name` and `environment`"])
    if not isinstance(raw, dict):
        raise ConfigError(source, [f"must be a mapping of keys to values at the top, got {_kind(raw)}"])
    plain, mistakes = plain_of(raw)
    if mistakes:
        raise ConfigError(source, [str(mistake) for mistake in mistakes])
    assert isinstance(plain, dict)
    return plain


def _parse_yaml(text: str) -> Any:
    """What the text says; YAMLError, RecursionError or ValueError if it is none, or too much."""
    # pure: the C parser reads YAML 1.1, where `on` is true and 1e-3 a string.
    yaml = YAML(typ="safe", pure=True)
    if _open_brackets(text) > 8 * MAX_DEPTH:
        # The parser's time grows with their number squared.
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    try:
        node = yaml.compose(text)
        if node is None:
            return None
        _check_size(node)
        return yaml.constructor.construct_document(node)
    except (YAMLError, RecursionError, ValueError):
        raise
    except Exception as error:
        # The parser stumbles over some texts that are none of YAML.
        raise ValueError(f"the parser gave up ({type(error).__name__}: {error})") from error


def _open_brackets(text: str) -> int:
    """How deep brackets are nested at most, those in texts and comments included."""
    depths = itertools.accumulate(1 if mark in "[{" else -1 for mark in _BRACKET.findall(text))
    return max(depths, default=0)


def _check_size(top: Node) -> None:
    """ValueError if the nodes, each as often as it is referred to, are too many, too deep, or contain themselves.

    Anchors are still shared here, so this takes as long as the text is long, whatever it stands for.
    """
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size_of(node: Node, depth: int) -> int:
        if depth > 2 * MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if id(node) in inside:
            raise ValueError("an anchor contains itself")
        if id(node) not in sizes:
            inside.add(id(node))
            below = sum(size_of(one, depth + 1) for one in _below(node))
            inside.remove(id(node))
            sizes[id(node)] = 1 + below + (0 if isinstance(node.value, list) else len(node.value))
        if sizes[id(node)] > MAX_EXPANDED:
            raise ValueError(f"its anchors make it larger than {MAX_EXPANDED} values and characters")
        return sizes[id(node)]

    size_of(top, 0)


def _below(node: Node) -> list[Node]:
    if isinstance(node, SequenceNode):
        return list(node.value)
    return [part for pair in node.value for part in pair] if isinstance(node, MappingNode) else []


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
        if not equals or not all(keys) or len(keys) > MAX_DEPTH:
            yield Mistake("", f"override {_shown(override)}: must look like key.path=value")
            continue
        if len(override) > MAX_BYTES or not _is_unicode(override):
            yield Mistake("", f"override {_shown(override)}: is too long, or no Unicode text")
            continue
        try:
            value, mistakes = plain_of(_parse_yaml(text), dotted)
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


def plain_of(value: Any, at: str = "", depth: int = 0) -> tuple[Any, list[Mistake]]:
    """The value with JSON types only (the configuration travels as JSON), and what is not one."""
    if depth > MAX_DEPTH:
        return None, [Mistake(at, f"is nested deeper than {MAX_DEPTH} levels")]
    mistakes: list[Mistake] = []
    if isinstance(value, dict):
        plain: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str) or not _is_unicode(key):
                mistakes.append(Mistake(join(at, key), "keys must be words; put it in quotes"))
                continue
            plain[key], found = plain_of(item, join(at, key), depth + 1)
            mistakes += found
            if len(mistakes) > MAX_DEPTH:
                break
        return plain, mistakes
    if isinstance(value, list):
        items = [plain_of(item, join(at, index), depth + 1) for index, item in enumerate(value)]
        return [item for item, _ in items], [mistake for _, found in items for mistake in found]
    if isinstance(value, str) and not _is_unicode(value):
        return "", [Mistake(at, "holds characters that no Unicode text has")]
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return 0, [Mistake(at, "is a whole number beyond 2^63")]
    if isinstance(value, float) and not math.isfinite(value):
        return value, [Mistake(at, f"must be a finite number, got {value}")]
    if value is None or isinstance(value, bool | int | float | str):
        return value, []
    return None, [Mistake(at, f"must be a number, a word, a list or a mapping, got {_kind(value)}; put it in quotes")]


def _is_unicode(text: str) -> bool:
    """Whether it can be written down: halves of surrogate pairs cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(text: str) -> str:
    """For a mistake's text, not longer than a line."""
    return ascii(text) if len(text) <= 100 else f"{text[:100]!a}..."


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


__all__ = [
    "MAX_BYTES", "MAX_DEPTH", "Mistake", "apply_overrides", "dump_yaml", "join", "mapping_of", "plain_of", "read_yaml",
    "set_key",
]  # fmt: skip
