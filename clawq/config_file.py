"""From a YAML file and `key.path=value` overrides to one valid `RunConfig`, or to all mistakes at once.

Types are strict (a quoted "8" or `true` is no count), except that a whole number written as `2e6` is an integer too.
The options of the named environment and algorithm are validated by their plugins' own `Options` models, and come back
whole, with every default written out: what `clawq config show` prints is what runs, on every machine.

Nothing is guessed: an unknown key is a mistake that names the nearest valid one.
"""

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from clawq.config import RunConfig
from clawq.config_removed import REMOVED, without_removed
from clawq.config_rules import broken_rules
from clawq.config_yaml import Mistake, apply_overrides, dump_yaml, join, plain_of, read_yaml
from clawq.errors import ConfigError, PluginError
from clawq.json_text import LARGEST
from clawq.plugins import load, names

#: section of RunConfig -> plugin group whose `Options` model validates its `options`.
_PLUGIN_SECTIONS = {"environment": "environments", "algorithm": "algorithms"}

_Loc = tuple[int | str, ...]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, apply the overrides in order, validate everything.

    Args:
        path: the YAML file; one in a run folder may have keys that are gone (`clawq.config_removed`).
        overrides: `key.path=value` each; the value is read as YAML, so `a.b=null` and `a.b=[1, 2]` work.

    Raises:
        ConfigError: with every mistake found, each as `path: what is wrong; what is allowed`.
    """
    raw = read_yaml(Path(path))
    if (Path(path).parent / "run.json").is_file():
        raw = without_removed(raw, str(path))
    return _changed(raw, overrides, str(path))


def change_config(raw: Mapping[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    """The like of a configuration that is already a mapping, as from a run folder; `raw` stays as it is."""
    return _changed(copy.deepcopy(dict(raw)), overrides, source)


def _changed(raw: dict[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    mistakes = list(apply_overrides(raw, overrides))
    config, found = _validated(raw)
    mistakes += found
    if mistakes or config is None:
        given = [text.partition("=")[0] for text in overrides]
        raise ConfigError(source, [_line(mistake, given) for mistake in mistakes])
    return config


def parse_config(raw: Mapping[str, Any], source: str) -> RunConfig:
    """Validate a configuration that is already a mapping, as from a run folder. Raises ConfigError for `source`."""
    # What comes from Redis was no YAML, whose reader refuses such things.
    plain, mistakes = plain_of(dict(raw))
    config, found = (None, []) if mistakes else _validated(plain)
    mistakes += found
    if config is None:
        raise ConfigError(source, [str(mistake) for mistake in mistakes])
    return config


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back to an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def _validated(raw: dict[str, Any]) -> tuple[RunConfig | None, list[Mistake]]:
    config, mistakes = _fit(RunConfig, raw, "")
    options: dict[str, Any] = {}
    for section in _PLUGIN_SECTIONS:
        complete, found = _plugin_options(section, raw)
        options[section] = complete
        mistakes += found
    mistakes += _unknown_writers(raw.get("metrics"))
    mistakes += [Mistake(*line.split(": ", 1)) for line in broken_rules(_good_sections(raw))]
    if mistakes or config is None:
        return None, mistakes
    sections = {name: getattr(config, name).model_copy(update={"options": options[name]}) for name in options}
    return config.model_copy(update=sections), []


def _fit(model: type[BaseModel], raw: Any, at: str) -> tuple[Any, list[Mistake]]:
    """The model made from `raw`, or None and the mistakes. Whole floats where an integer belongs become integers."""
    try:
        return _strict(model, raw), []
    except ValidationError as first:
        if not any([_settle(raw, item["loc"], item["input"]) for item in first.errors() if item["type"] == "int_type"]):
            return None, _mistakes(model, first, at)
    try:
        return _strict(model, raw), []
    except ValidationError as second:
        return None, _mistakes(model, second, at)


def _strict(model: Any, raw: Any) -> Any:
    # JSON mode: strict about numbers and words, yet a list is a fine tuple and a string a fine path or enum.
    return _adapter(model).validate_json(_adapter(Any).dump_json(raw), strict=True)


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    """Made once: it takes longer than all else of a validation."""
    return TypeAdapter(model)


def _settle(raw: Any, loc: _Loc, value: Any) -> bool:
    if not isinstance(value, float) or not value.is_integer() or abs(value) >= LARGEST or not loc:
        return False
    at = raw
    try:
        for part in loc[:-1]:
            at = at[part]
        if at[loc[-1]] != value:
            return False
        at[loc[-1]] = int(value)
    except (KeyError, IndexError, TypeError):
        return False  # a location inside a union names the branch, not a key
    return True


def _plugin_options(section: str, raw: Mapping[str, Any]) -> tuple[Any, list[Mistake]]:
    """The options of a plugin section, completed by the plugin's model; the mistakes in its name and options."""
    default = RunConfig.model_fields[section].default
    given = raw.get(section, {})
    name = given.get("name", getattr(default, "name", None)) if isinstance(given, dict) else None
    if not isinstance(name, str):
        return None, []  # already a mistake of the section itself
    try:
        plugin = load(_PLUGIN_SECTIONS[section], name)
    except PluginError as error:
        return None, [Mistake(f"{section}.name", str(error))]
    if not hasattr(plugin, "Options"):
        return None, [Mistake(f"{section}.name", f"the plugin {name!r} has no Options model, so it is no {section}")]
    options = given.get("options", {})
    if not isinstance(options, dict):
        return None, []
    fitted, mistakes = _fit(plugin.Options, options, f"{section}.options")
    return (None, mistakes) if fitted is None else (fitted.model_dump(mode="json"), [])


def _unknown_writers(given: Any) -> list[Mistake]:
    if not isinstance(given, list):
        return []
    known = names("metric_writers")
    unknown = [name for name in given if isinstance(name, str) and name not in known]
    return [Mistake("metrics", f"no metric writer is named {name!r}{_options(name, known)}") for name in unknown]


def _good_sections(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Field of RunConfig -> its validated value, for those sections that are valid by themselves."""
    good: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        model = _model_in(field.annotation)
        if model is None:
            continue
        try:
            good[name] = _strict(model, raw[name]) if name in raw else field.get_default()
        except ValidationError:
            continue
        if not isinstance(good[name], model):
            del good[name]  # required, and absent
    return good


# --- words ----------------------------------------------------------------------------------------------------------


def _mistakes(model: type[BaseModel], error: ValidationError, at: str) -> list[Mistake]:
    return [_sentence(model, dict(item), at) for item in error.errors(include_url=False)]


def _sentence(model: type[BaseModel], item: Mapping[str, Any], at: str) -> Mistake:
    loc: _Loc = item["loc"]
    path = at
    for part in loc:
        path = join(path, part)
    if item["type"] == "extra_forbidden":
        return Mistake(path, _unknown_key(model, loc, path))
    if item["type"] == "missing":
        return Mistake(path, "is required")
    if item["type"] in {"value_error", "assertion_error"}:
        return Mistake(path, str(item["msg"]).partition(", ")[2])
    text = str(item["msg"]).replace("Input should be", "must be").replace("Input should", "must")
    shown = repr(item["input"])
    return Mistake(path, f"{text[0].lower()}{text[1:]}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _unknown_key(model: type[BaseModel], loc: _Loc, path: str) -> str:
    return str(REMOVED[path]) if path in REMOVED else "unknown key" + _nearest_key(model, loc)


def _nearest_key(model: type[BaseModel], loc: _Loc) -> str:
    key = str(loc[-1])
    owner: type[BaseModel] | None = model
    for part in loc[:-1]:
        field = owner.model_fields.get(str(part)) if owner is not None else None
        owner = _model_in(field.annotation) if field is not None else None
    known = list(owner.model_fields) if owner is not None else []
    # A key put one level too high or too low: say where it belongs.
    elsewhere = [path for path in _all_keys(RunConfig) if path.rpartition(".")[2] == key]
    if elsewhere and not difflib.get_close_matches(key, known):
        return f"; did you mean {' or '.join(elsewhere)}?"
    return _options(key, known)


def nearest_key(key: str) -> str | None:
    """What to say of a dotted key that no configuration has; None if there is one. Options of plugins pass."""
    parts = tuple(key.split("."))
    owner: type[BaseModel] | None = RunConfig
    for depth, part in enumerate(parts):
        if owner is None or part not in owner.model_fields:
            return _unknown_key(RunConfig, parts[: depth + 1], key)
        if part == "options":
            return None
        owner = _model_in(owner.model_fields[part].annotation)
    return None


def _options(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{hint} (valid: {', '.join(known) or 'none'})"


def _all_keys(model: type[BaseModel], at: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield join(at, name)
        if inner := _model_in(field.annotation):
            yield from _all_keys(inner, join(at, name))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def _line(mistake: Mistake, given: Sequence[str]) -> str:
    told = any(mistake.at == path or mistake.at.startswith(f"{path}.") for path in given)
    return f"{mistake} (from the command line)" if told else str(mistake)


__all__ = ["load_config", "nearest_key", "parse_config", "to_yaml"]
