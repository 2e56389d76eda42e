"""`help` and `completion`: the command line about itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def help(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="Command to explain.", show_default=False),
    ] = None,
) -> None:
    """Show the help of a command, as `COMMAND --help` does."""
    from mooncake_p2p.main import run

    raise typer.Exit(run([*(command or []), "--help"]))


def completion(
    shell: Annotated[
        Shell, typer.Argument(metavar="bash|zsh|fish", help="Your shell.", show_default=False)
    ],
) -> None:
    """Print a script that completes commands, options and keys with Tab.

    Keys and names of checkpoints come from the local peer, if it answers at once.
    """
    from mooncake_p2p.completion import script

    print(script(shell.value))
