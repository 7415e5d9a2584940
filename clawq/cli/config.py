"""`clawq config show | check`: what a configuration file means, before anything runs.

Both read the file and the overrides exactly as `clawq up` does, plugin options included. Neither makes the
environment: a wrong environment id or a missing simulator shows when a run starts.
"""

from pathlib import Path

import click


@click.group()
def config() -> None:
    """Check a configuration, or show it with all defaults.

    CONFIG is a YAML file; each KEY.PATH=VALUE replaces one value, as in `replay.batch_size=512`.
    """


@config.command()
@click.argument("file", metavar="CONFIG", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[KEY.PATH=VALUE]...", nargs=-1)
def show(file: Path, overrides: tuple[str, ...]) -> None:
    """Print the whole configuration as YAML, with all defaults."""
    from clawq.config_file import load_config, to_yaml

    click.echo(to_yaml(load_config(file, overrides)), nl=False)


@config.command()
@click.argument("file", metavar="CONFIG", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[KEY.PATH=VALUE]...", nargs=-1)
def check(file: Path, overrides: tuple[str, ...]) -> None:
    """Report all mistakes in a configuration; exit status 2 if there are any."""
    from clawq.config_file import load_config

    loaded = load_config(file, overrides)
    click.echo(f"{file}: fine (run {loaded.name!r}: {loaded.algorithm.name} on {loaded.environment.name})")
