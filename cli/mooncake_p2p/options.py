"""Options that commands share, records of options, durations as people write them, and the connection to the peer."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from p2pstore.objects import encode_namespace, parse_duration

BLAS_THREADS: Final = "OPENBLAS_NUM_THREADS"

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

DEFAULT_TIMEOUT: Final = "5"


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, **more)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


Key = Annotated[str, argument("KEY", "Name of the object.")]
Keys = Annotated[list[str], argument("KEY", "Names of the objects.")]

Socket = Annotated[
    str | None,
    option(
        "PATH",
        "The local peer's socket; needed only when several peers run here.",
        envvar="MOONCAKE_P2P_SOCKET",
    ),
]
Namespace = Annotated[str, option("NAME", "Namespace of the keys.", envvar="MOONCAKE_P2P_NAMESPACE")]
Timeout = Annotated[
    str, option("SECONDS", "Give up after this time without progress.", envvar="MOONCAKE_P2P_TIMEOUT")
]
Yes = Annotated[bool, flag("--yes", "Do not ask whether you are sure.")]
Include = Annotated[
    list[str] | None,
    option("PATTERN", "Only files whose path matches, such as '*.safetensors'. Repeatable."),
]
Exclude = Annotated[list[str] | None, option("PATTERN", "No files whose path matches.")]
Json = Annotated[bool, flag("--json", "Print the result as JSON on stdout.")]


@dataclass(frozen=True, slots=True)
class AtPeer:
    """The options of commands about objects: whom to ask, and the form of the answer."""

    socket: Socket = None
    namespace: Namespace = "default"
    timeout: Timeout = DEFAULT_TIMEOUT
    json: Json = False

    def connected(self) -> AbstractContextManager[BlockingClient]:
        return connected(self.socket, self.namespace, self.timeout)


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of the dataclasses that are its keyword-only parameters."""
    own = inspect.signature(command, eval_str=True)
    annotations: dict[str, Any] = {name: each.annotation for name, each in own.parameters.items()}
    records: dict[str, Any] = {name: kind for name, kind in annotations.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, each in own.parameters.items():
        if name not in records:
            parameters.append(each.replace(kind=each.KEYWORD_ONLY))
            continue
        hints = get_type_hints(each.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                each.KEYWORD_ONLY,
                default=each.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(each.annotation)
        ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, record in records.items():
            own_fields = [field.name for field in fields(record) if field.name in given]
            given[name] = record(**{each: given.pop(each) for each in own_fields})
        command(**given)

    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def was_given(name: str) -> bool:
    """Whether the command that runs was given this option (`timeout` for --timeout), not its variable."""
    command = import_module("typer.main").get_current_context(silent=True)
    source = command.get_parameter_source(name) if command is not None else None
    return source is not None and source.name == "COMMANDLINE"


def origin_of(option: str, environment_variable: str) -> str:
    """The option, or the variable that stood for it in the command that runs."""
    command = import_module("typer.main").get_current_context(silent=True)
    name = option.removeprefix("--").replace("-", "_")
    source = command.get_parameter_source(name) if command is not None else None
    return environment_variable if source is not None and source.name == "ENVIRONMENT" else option


def parse_timeout(text: str, option: str = "--timeout") -> float:
    """A duration above zero. Raises `ValueError` naming the option, or the variable that stood for it."""
    if option == "--timeout":
        option = origin_of(option, "MOONCAKE_P2P_TIMEOUT")
    seconds = parse_duration(text, option)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{option}: {text!r} must be more than 0 seconds")
    return seconds


@contextmanager
def importing() -> Iterator[None]:
    """Load modules, all of which stay: without a search for garbage among them, and without threads for numpy's linear
    algebra, which nothing here uses. That saves a fifth of a short command's CPU time."""
    is_unset = BLAS_THREADS not in os.environ
    if is_unset:
        os.environ[BLAS_THREADS] = "1"
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if is_unset:
            del os.environ[BLAS_THREADS]  # programs that this one starts may need them


@contextmanager
def connected(
    socket: str | None, namespace: str = "default", timeout: str = DEFAULT_TIMEOUT
) -> Iterator[BlockingClient]:
    """A client of the local peer, closed at the end.

    Raises `NoLocalPeer` when none listens and `AmbiguousLocalPeer` when several do.
    """
    timeout_seconds = parse_timeout(timeout)
    try:
        encode_namespace(namespace)
    except ValueError as error:
        raise ValueError(f"{origin_of('--namespace', 'MOONCAKE_P2P_NAMESPACE')}: {error}") from None
    if socket == "":
        raise ValueError("--socket is empty: give a value or leave it out")
    with importing():
        from p2pstore import blocking
    with blocking.connect(socket, namespace=namespace, timeout=timeout_seconds) as client:
        yield client
