"""`help` and `completion`: the command line about itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from mooncake_p2p.options import argument


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def help(
    command: Annotated[list[str] | None, argument("COMMAND", "Command to explain.")] = None,
) -> None:
    """Show the help of a command, as `COMMAND --help` does."""
    from mooncake_p2p.main import run

    raise typer.Exit(run([*(command or []), "--help"]))


def completion(shell: Annotated[Shell, argument("bash|zsh|fish", "Your shell.")]) -> None:
    """Print a script that completes commands, options and keys with Tab.

    Keys and names of checkpoints come from the local peer, if it answers at once.
    """
    from mooncake_p2p.completion import script

    print(script(shell.value))
