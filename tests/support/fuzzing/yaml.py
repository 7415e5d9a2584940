"""Text of a configuration: a whole file, or overrides of a good one."""

from clawq.config_file import change_config, parse_config, to_yaml
from clawq.config_yaml import mapping_of
from clawq.errors import ConfigError
from fuzzing import check_text
from fuzzing.config import SMALL

#: What begins with this byte is a list of overrides, one a line.
_OVERRIDES = "="


def one_input(data: bytes) -> None:
    """Load; what is accepted must come back equal from its dump."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        if text.startswith(_OVERRIDES):
            config = change_config(SMALL, text[1:].split("\n"), "overrides")
        else:
            config = parse_config(mapping_of(text, "fuzzed"), "fuzzed")
    except ConfigError as error:
        check_text(error, 1_000_000)
        return
    assert parse_config(mapping_of(to_yaml(config), "dumped"), "dumped") == config


def seeds() -> list[bytes]:
    """A small file, one with most keys, some overrides, and YAML of every kind."""
    small = "name: small\nenvironment: {name: point}\n"
    larger = (
        "name: a\nseed: 3\nenvironment: {name: point, num_envs: 4}\nalgorithm: {name: td3, options: {gamma: 0.98}}\n"
        "replay: {capacity: 100_000, batch_size: 64, sampler: prioritized}\nrate_limit: {samples_per_insert: 8}\n"
        "budget: {env_steps: 1e4}\nredis: {broker_url: null}\n"
    )
    kinds = "a: &x [1, 0x1f, 1e-3, .inf, ~, 'q', \"\\u00e9\"]\nb: *x\n<<: {c: !!str 1, d: 2001-01-01}\n? k\n: |\n  t\n"
    overrides = "=seed=4\nreplay.capacity=2e5\nbudget={env_steps: 7}\nmetrics=[jsonl]"
    return [one.encode() for one in (small, larger, kinds, overrides)]
