"""`config show`: every setting of a peer, and where its value comes from."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from mooncake_p2p.commands.join import join
from mooncake_p2p.join_settings import CONFIG_VARIABLE, INVITE_VARIABLE, gather
from mooncake_p2p.options import Json
from mooncake_p2p.output import print_json, print_table, remark
from p2pstore.objects import format_bytes

CLIENT_VARIABLES: Final = tuple(
    f"MOONCAKE_P2P_{name}" for name in ("NAMESPACE", "TIMEOUT", "DEBUG", "DETACHED")
)
NOT_SETTINGS: Final = ("detach",)


class Action(StrEnum):
    show = "show"


def _with_options_of_join(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**given` the options of `join`, which say what to show."""
    own = inspect.signature(command, eval_str=True)
    of_join = inspect.signature(join, eval_str=True)
    parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters += [each for name, each in of_join.parameters.items() if name not in NOT_SETTINGS]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@_with_options_of_join
def config(
    action: Annotated[
        Action,
        typer.Argument(metavar="show", help="What to do; there is only this.", show_default=False),
    ],
    json: Json = False,
    **given: Any,
) -> None:
    """Show every setting of a peer with its origin.

    Takes the options of `join`, and shows what `join` would make of them here: flags over MOONCAKE_P2P_*
    over the file of --config over the invite over defaults. Nothing is started, and no secret is shown: of
    the cluster key only the file's path.
    """
    from p2pstore.settings import misspelled_variables, shown_settings

    settings, _ = gather({name: value for name, value in given.items() if value is not None})
    shown = shown_settings(settings)
    known = (*CLIENT_VARIABLES, CONFIG_VARIABLE, INVITE_VARIABLE)
    for variable, meant in misspelled_variables(os.environ, known).items():
        remark(f"{variable} is no setting; did you mean {meant}?")
    if json:
        print_json([asdict(each) for each in shown])
        return
    print_table(
        ("SETTING", "VALUE", "ORIGIN"),
        [(each.name, _text(each.name, each.value), each.origin) for each in shown],
        fold=("VALUE", "ORIGIN"),
    )


def _text(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    if name == "memory" and isinstance(value, int):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
