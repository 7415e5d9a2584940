"""The `clawq` command: lazily loaded subcommands, and errors told as people tell them.

`clawq --help` imports click and this module only (tested, at most 0.3 s): a subcommand's module is imported when it is
run or when its own help is asked for. Installed packages add commands through the entry point group `clawq.commands`;
each is a click command, found by name and loaded when used. A built-in name always wins.

Exit status: 0 fine, 2 a mistake in what the user wrote, 3 Redis, 4 the learner, 1 another refusal of ours,
130 interrupted, 70 a bug of ours (then, and only then, with a traceback; CLAWQ_DEBUG=1 shows it always).
"""

import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from clawq import __version__
from clawq.errors import ClawqError

#: command -> (module:attribute, one line of help).
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "up": ("clawq.cli.up:up", "Train on this machine: Redis, worker, learner, all in one."),
        "learner": ("clawq.cli.learner:learner", "Start or stop a learner that uses workers elsewhere."),
        "worker": ("clawq.cli.worker:worker", "Start a worker: it gives its slots to runs."),
        "redis": ("clawq.cli.redis:redis", "Start or stop the two Redis servers that come with clawq."),
        "tune": ("clawq.cli.tune:tune", "Change settings of a run while it goes on."),
        "reader": ("clawq.cli.reader:reader", "Show who reads a run's streams, or give up a reader's claim on them."),
        "watchdog": ("clawq.cli.watchdog:watchdog", "End what hangs or was left behind on this machine, and say why."),
        "status": ("clawq.cli.status:status", "Show the runs and their workers."),
        "log": ("clawq.cli.log:log", "Look into the experience of a run: list, show, export."),
        "replay": ("clawq.cli.replay:replay", "Train again from a recorded run, without simulator or workers."),
        "bisect": ("clawq.cli.bisect:bisect", "Find the fragment after which learning went wrong."),
        "config": ("clawq.cli.config:config", "Check a configuration, or show it in full."),
        "plugins": ("clawq.cli.plugins:plugins", "List installed environments, algorithms and more."),
    }
)

#: Exit status of a bug, after BSD's EX_SOFTWARE.
EXIT_BUG = 70
#: Exit status after Ctrl-C, as shells count it: 128 + SIGINT.
EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that knows its commands by name and help line, and imports one when it is needed."""

    def table(self) -> Mapping[str, tuple[str, str]]:
        """Name of a command -> (module:attribute, one line of help)."""
        raise NotImplementedError

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table():
            return None
        module, _, attribute = self.table()[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As in click, without importing the commands for their help lines."""
        table = self.table()
        rows = [(name, table[name][1] if name in table else "(plugin)") for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx) from error


class TopGroup(LazyGroup):
    """The commands of clawq and those of installed packages."""

    def table(self) -> Mapping[str, tuple[str, str]]:
        return COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        from clawq.plugins import names

        added = [name for name in names("commands") if name not in COMMANDS]
        return [*COMMANDS, *added]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from clawq.plugins import load, names

        command = super().get_command(ctx, cmd_name)
        return load("commands", cmd_name) if command is None and cmd_name in names("commands") else command


@click.group(cls=TopGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="clawq")
def cli() -> None:
    """Asynchronous, distributed reinforcement learning of robot hands over Celery, Redis Streams and PyTorch."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status. The entry point of `clawq`."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status; when stdout's reader has gone, click ends the process."""
    try:
        status = cli.main(arguments, prog_name="clawq", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except ClawqError as error:
        if os.environ.get("CLAWQ_DEBUG"):
            traceback.print_exc()
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        click.echo("\nThis is a bug in clawq; please report it with the lines above.", err=True)
        return EXIT_BUG


if __name__ == "__main__":
    main()
