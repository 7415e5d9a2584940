"""`clawq plugins list`: what is installed, by group. Nothing is imported unless `--load` asks for it."""

import click


@click.group()
def plugins() -> None:
    """List installed environments, algorithms and other plugins."""


@plugins.command("list")
@click.option("--load", "try_loading", is_flag=True, help="Also import each plugin, and say which fail.")
def list_plugins(try_loading: bool) -> None:
    """List all plugins: name, what is imported, and the distribution that brings it."""
    from clawq.plugins import GROUPS, installed

    for group, kind in GROUPS.items():
        click.echo(f"{group}: {kind}")
        found = installed(group)
        width = max((len(plugin.name) for plugin in found), default=0)
        for plugin in found:
            line = f"  {plugin.name:{width}}  {plugin.target}  ({plugin.distribution})"
            if plugin.duplicate:
                line += "  DUPLICATE: cannot be used while several distributions register this name"
            elif try_loading:
                line += f"  {_state(group, plugin.name)}"
            click.echo(line)
        if not found:
            click.echo("  (none)")


def _state(group: str, name: str) -> str:
    from clawq.errors import PluginError
    from clawq.plugins import load

    try:
        load(group, name)
    except PluginError as error:
        return f"FAILS: {error.__cause__ or error}"
    return "loads"
