# SPDX-License-Identifier: Apache-2.0
"""The command `v41`: one module a command, imported when it is called. Exit 0 pass, 1 fail, 2 usage or nothing to compare."""

import sys
from importlib import import_module

import click

COMMANDS = {
    "bench": "Figures of one run on this machine.",
    "checkpoint": "Make checkpoints by the weight recipe.",
    "graph": "A step of one rank as one captured graph, read at full size.",
    "conformance": "Whether a backend computes the model, and where it leaves it first.",
    "generate": "Continue a prompt, with drafts, streaming.",
    "golden": "Make, check and compare golden outputs.",
    "inspect": "What a checkpoint folder holds, from its headers.",
    "plan": "What a placement on many ranks costs: bytes, collectives, time.",
}


class Commands(click.Group):
    """Subcommands by name, each from the module of that name in this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"v41.cli.{cmd_name}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=Commands, help="DeepSeek-V4.1-Flash: golden outputs and conformance.", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="v41")
def cli() -> None:
    """The group."""


def main() -> None:
    """Runs the command line; a ValueError, or a file that cannot be read or written, is the user's to mend: its text on stderr and exit 2."""
    try:
        cli(prog_name="v41", standalone_mode=True)
    except (ValueError, OSError) as e:
        click.echo(f"v41: {e}", err=True)
        sys.exit(2)
