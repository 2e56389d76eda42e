"""Commands made of annotated functions: an `Option` or `Argument` in an annotation becomes a parameter of click."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import click

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # no generic class before click 8.2


class Option:
    """How a parameter is an option. Without names it is called like the parameter."""

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str | None = None,
        envvar: str | None = None,
        min: int | None = None,
        max: int | None = None,
        show_default: bool | str = True,
        group: str | None = None,
    ) -> None:
        self.names, self.group, self.min, self.max = names, group, min, max
        self.settings = {
            "help": help,
            "metavar": metavar,
            "envvar": envvar,
            "show_envvar": True,
            "show_default": show_default,
        }


class Argument:
    """How a parameter is an argument: required when it has no default, repeatable when it is a list."""

    def __init__(self, *, metavar: str, help: str) -> None:
        self.metavar, self.help = metavar, help


class GroupedOption(click.Option):
    """An option that only --help-all shows when it has a group."""

    group: str | None = None


class ExplainedArgument(click.Argument):
    """An argument that stands in the help with a text."""

    help = ""

    def make_metavar(self, ctx: Any = None) -> str:
        """As in the line of usage."""
        name = self.metavar or ""
        return name if self.required else f"[{name}]"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.metavar or "", f"{self.help}  [required]" if self.required else self.help


class Words(_Choice):
    """One word of an enumeration; converts to its member."""

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__([each.value for each in kind])
        self.kind = kind

    def convert(self, value: Any, param: Any, ctx: Any) -> StrEnum:
        return self.kind(super().convert(value, param, ctx))


def _kind_of(annotation: Any) -> tuple[Any, bool]:
    """The type of a value, without None, and whether there are several."""
    kinds = [each for each in get_args(annotation) if each is not NoneType]
    if get_origin(annotation) is list:
        return kinds[0], True
    return _kind_of(kinds[0]) if kinds else (annotation, False)


def _type_of(kind: Any, option: Option) -> Any:
    limited = option.min is not None or option.max is not None
    if limited and kind is int:
        return click.IntRange(option.min, option.max)
    if limited and kind is float:
        return click.FloatRange(option.min, option.max)
    return Words(kind) if issubclass(kind, StrEnum) else kind


def _parameter(each: inspect.Parameter) -> click.Parameter:
    annotation, declared = get_args(each.annotation)
    kind, several = _kind_of(annotation)
    given: dict[str, Any] = {"required": True}
    if each.default is not each.empty:
        default = each.default.value if isinstance(each.default, StrEnum) else each.default
        given = {"default": default}  # of an enumeration, click would show the name
    if isinstance(declared, Argument):
        argument = ExplainedArgument(
            [each.name],
            type=Words(kind) if issubclass(kind, StrEnum) else kind,
            nargs=-1 if several else 1,
            metavar=declared.metavar,
            **({"required": False} | given),
        )
        argument.help = declared.help
        return argument
    settings = declared.settings | given
    if kind is bool:
        settings |= {"is_flag": True, "show_default": False}
    else:
        settings |= {"type": _type_of(kind, declared), "multiple": several}
        if issubclass(kind, StrEnum) and settings["metavar"] is None:
            settings["metavar"] = f"<{'|'.join(kind)}>"
    names = declared.names or ("--" + each.name.replace("_", "-"),)
    option = GroupedOption([*names, each.name], **settings)
    option.group = declared.group
    return option


def command_of(
    function: Callable[..., None], name: str, kind: type[click.Command], **settings: Any
) -> click.Command:
    """The command that calls this function with its arguments and options, and says its docstring as help."""
    parameters = inspect.signature(function, eval_str=True).parameters
    lists = [each.name for each in parameters.values() if _kind_of(get_args(each.annotation)[0])[1]]

    def call(**given: Any) -> None:
        for each in lists:
            given[each] = list(given[each]) or None
        function(**given)

    return kind(
        name,
        params=[_parameter(each) for each in parameters.values()],
        callback=call,
        help=inspect.cleandoc(function.__doc__ or ""),
        **settings,
    )
