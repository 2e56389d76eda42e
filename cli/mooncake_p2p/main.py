"""The command `mooncake-p2p`: finds the command that was asked for, runs it, and turns whatever
happens into an exit status.

A command's module is imported when the command is called, so `--help` and every error in the
arguments answer before anything heavy is loaded. Help is plain text: rich's costs another 60 ms.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise, takewhile
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

import p2pstore
from mooncake_p2p.manual import COMMANDS, PAGES
from mooncake_p2p.output import (
    STANDARD_OUTPUT,
    AlreadyTold,
    ExitCode,
    describe,
    error_document,
    exit_code,
    json_output,
)

PROGRAM: Final = "mooncake-p2p"
COMPLETION_VARIABLE: Final = "_MOONCAKE_P2P_COMPLETE"
"""Set by the script in the shell that wants to know completions rather than to run a command."""

MEANT: Final = {
    **dict.fromkeys(("set", "store", "write", "add", "upload"), "put"),
    **dict.fromkeys(("read", "cat", "fetch", "download"), "get"),
    **dict.fromkeys(("del", "delete", "remove", "unlink"), "rm"),
    **dict.fromkeys(("exists", "contains", "find", "where"), "locate"),
    **dict.fromkeys(("info", "status", "top", "metrics"), "stats"),
    **dict.fromkeys(("list", "keys", "scan", "dir"), "ls"),
    **dict.fromkeys(("start", "serve", "run", "server", "up"), "join"),
    **dict.fromkeys(("stop", "quit", "shutdown", "down"), "leave"),
    **dict.fromkeys(("members", "nodes"), "peers"),
    **dict.fromkeys(("clear", "flushall", "flushdb"), "flush"),
    **dict.fromkeys(("ping", "check", "diagnose"), "doctor"),
    "version": "--version",
}
"""Names of other stores' commands -> the command, or option, of this program."""

HELP_ALL: Final = "--help-all"
PEER_NAME: Final = "peer_name"
HELP_OPTIONS: Final = ("-h", "--help")
FILE_METAVARS: Final = ("FILE", "DIR", "PATH")
"""In the metavar of what names a file."""

NOT_A_NUMBER: Final = re.compile(r"\S+ is not a valid (?:int|integer|float)(?: range)?\b")
OUT_OF_RANGE: Final = re.compile(
    r"(\S+) is not in the range (?:(\S+)<=)?x(?:>=(\S+?))?(?:<=(\S+?))?\.?$"
)
"""How typer says what is wrong with a number."""


class ManualCommand(TyperCommand):
    """A command whose help ends with examples and what its exit status means."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def invoke(self, ctx: Any) -> Any:
        """A path or command without anything in it comes of an unset variable: "" would be the current directory."""
        for parameter in self.params:
            metavar = parameter.metavar or ""
            named = any(word in metavar for word in (*FILE_METAVARS, "CMD"))
            if named and ctx.params.get(parameter.name) == "":
                name = metavar if parameter.param_type_name == "argument" else parameter.opts[0]
                ctx.fail(f"{name} is empty: give a value or leave it out")
        peer_name = ctx.params.pop(PEER_NAME, None)
        if peer_name is not None:
            if ctx.get_parameter_source("socket").name == "COMMANDLINE":
                ctx.fail("-p and --socket both name a peer: leave one out")
            from p2pstore.local.socket_paths import socket_of

            ctx.params["socket"] = str(socket_of(peer_name))
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options, and with --help-all the options that have a group."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, text = record
                title = getattr(parameter, "rich_help_panel", None) or "Options"
                if parameter.param_type_name == "argument":
                    name, title = name.partition(" <")[0], "Arguments"  # without the Python type
                sections.setdefault(title, []).append((name, text))
        for title, rows in sections.items():
            if rows and (title in ("Arguments", "Options") or ctx.meta.get(HELP_ALL)):
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        page = PAGES.get(self.name or "")
        if page is None:
            return
        with formatter.section("Examples"):
            for line, purpose in page.examples:
                formatter.write(f"  {line}\n")
                with formatter.indentation(), formatter.indentation():
                    formatter.write_text(purpose)
        with formatter.section("Exit status"):
            formatter.write_dl([(str(status), meaning) for status, meaning in page.statuses])


def function_name(command: str) -> str:
    return re.sub("[ -]", "_", command)


def function_of(command: str) -> Callable[..., Any]:
    module = import_module(f"mooncake_p2p.commands.{COMMANDS[command][0]}")
    function: Callable[..., Any] = getattr(module, function_name(command))
    return function


def _peer_name_option() -> TyperOption:
    return TyperOption(
        param_decls=["-p", "--peer-name"],
        metavar="NAME",
        help="The peer of this machine with this name, in place of --socket.",
    )


def _help_all_option() -> TyperOption:
    def show(context: Any, parameter: Any, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            context.meta[HELP_ALL] = True
            print(context.get_help())
            raise typer.Exit

    return TyperOption(
        param_decls=[HELP_ALL],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show this message with all options.",
    )


class LazyCommands(Mapping[str, Any]):
    """The commands by name; looking one up imports its module."""

    def __getitem__(self, name: str) -> Any:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        names_of_help = {"help_option_names": list(HELP_OPTIONS)}
        app.command(name, cls=ManualCommand, context_settings=names_of_help)(function_of(name))
        command: Any = typer.main.get_command(app)
        if any(getattr(each, "rich_help_panel", None) for each in command.params):
            command.params.append(_help_all_option())
        for position, parameter in enumerate(command.params):
            if parameter.name == "socket" and parameter.envvar:  # a client's, not the peer's own
                command.params.insert(position, _peer_name_option())
                break
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """A group whose commands are imported when called, and listed without being imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()  # type: ignore[assignment]  # typer only reads it

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two_words = " ".join(args[:2])
        second = [each.split()[1] for each in COMMANDS if each.startswith(f"{args[0]} ")]
        if second and two_words not in COMMANDS and args[0] not in COMMANDS:
            if args[1:] and args[1] in HELP_OPTIONS:
                self._show_help_of(ctx, args[0])
            ctx.fail(f"{args[0]} is followed by one of: {', '.join(second)}")
        if args[0] in MEANT:
            ctx.fail(f"No such command '{args[0]}', did you mean '{MEANT[args[0]]}'?")
        return super().resolve_command(ctx, [two_words, *args[2:]] if two_words in COMMANDS else args)

    def _show_help_of(self, ctx: Any, first_word: str) -> None:
        """The commands that begin with a word that is none by itself."""
        formatter = ctx.make_formatter()
        formatter.write_usage(f"{PROGRAM} {first_word}", "COMMAND [OPTIONS] [ARGUMENTS]")
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, summary)
                    for name, (_, summary) in COMMANDS.items()
                    if name.startswith(f"{first_word} ")
                ]
            )
        formatter.write(f"\n`{PROGRAM} {first_word} COMMAND --help` says more of each.\n")
        print(formatter.getvalue(), end="")
        raise typer.Exit

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {p2pstore.__version__}")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        print(context.get_help())
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="MOONCAKE_P2P_DEBUG", help="Show the traceback of an error."),
    ] = False,
    # typer's own loads pydantic (65 ms) even when it is not given.
    help_wanted: Annotated[
        bool, typer.Option("--help", "-h", callback=_show_help, is_eager=True, help="Show this message.")
    ] = False,
) -> None:
    """A pool of memory for KV cache and checkpoints, from peer to peer, without a master.

    `mooncake-p2p demo` shows it at work; `mooncake-p2p join` starts a peer that serves this machine.

    Several machines share a key: `mooncake-p2p keygen FILE` makes it, `mooncake-p2p join
    --cluster-key-file FILE --interface NAME` starts the first peer, and `mooncake-p2p invite` there
    prints the line that starts a peer on the next machine.
    """


def build() -> Any:
    """The whole command, ready to parse arguments."""
    app = typer.Typer(
        cls=LazyGroup,
        subcommand_metavar="COMMAND ...",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog=(
            "Exit status: 0 done, 1 failed, 2 usage, 3 no such key, 4 no peer to talk to, "
            "5 deadline passed, 6 copies known but none reachable, 130 Ctrl-C. "
            "`mooncake-p2p help COMMAND` explains a command, with examples; MOONCAKE_P2P_SOCKET, "
            "MOONCAKE_P2P_NAMESPACE and MOONCAKE_P2P_TIMEOUT stand for the options of these names. "
            "With --json a command that fails prints an object with `error` on stdout: its type, "
            "message and status."
        ),
    )
    app.callback(add_help_option=False)(_options)
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit status. Errors are shown on stderr, never raised."""
    debug = False
    json_output.begin()
    status: int = ExitCode.DONE
    try:
        command = build()
        if not arguments:
            print(command.make_context(PROGRAM, [], resilient_parsing=True).get_help(), file=sys.stderr)
            return ExitCode.USAGE
        try:
            with command.make_context(PROGRAM, list(arguments)) as context:
                debug = context.params["debug"]
                command.invoke(context)
        except typer.Exit as exit_request:
            status = exit_request.exit_code
        json_output.end()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes stdout once more at the end; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.FAILED
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _report(error, arguments)


def _empty_option(error: Any, arguments: Sequence[str]) -> str:
    """The option that typer complains about, if it was given without anything in it."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = list(pairwise(arguments))
    given = (name for name in names if f"{name}=" in arguments or (name, "") in pairs)
    return next(given, "")


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    """Say on stderr and, with --json, on stdout what went wrong. Returns the exit status."""
    message = _message(error, arguments)
    stopped = isinstance(error, KeyboardInterrupt | SystemExit)
    if not (stopped or isinstance(error, AlreadyTold)):
        print(f"error: {message}", file=sys.stderr)
    if "--json" in takewhile(lambda word: word != "--", arguments):
        with contextlib.suppress(OSError):  # stdout itself may be what went wrong
            json_output.end(error_document(error, message), stopped=stopped)
            sys.stdout.flush()
    return exit_code(error)


def _message(error: BaseException, arguments: Sequence[str]) -> str:
    """One line: what went wrong and what to do about it."""
    if hasattr(error, "format_message"):  # what typer found wrong with the arguments
        context = getattr(error, "ctx", None)
        text = " ".join(error.format_message().split())
        text = OUT_OF_RANGE.sub(_range, NOT_A_NUMBER.sub("must be a number", text))
        text = re.sub(r" \(Possible options: (.*)\)$", r", did you mean \1?", text)
        empty = _empty_option(error, arguments)
        if empty:
            text = f"{empty} is empty: give a value or leave it out"
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        if hasattr(error, "option_name") and context is not None and context.parent is None:
            hint = f"; options of a command stand behind its name{hint}"
        return f"{text[:1].lower()}{text[1:].rstrip('.')}{hint}"
    return describe(error)


def _range(found: re.Match[str]) -> str:
    value, least, least_alone, most = found.groups()
    least = least or least_alone
    if least is not None and float(value) < float(least):
        return f"must be at least {least}"
    return f"must be at most {most}"


class _NamedStandardOutput(io.FileIO):
    """Descriptor 1, whose errors say that it is standard output: the system's name no file."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            raise


def _with_named_errors(stdout: io.TextIOWrapper) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_NamedStandardOutput(stdout.fileno(), "wb", closefd=False)),
        encoding=stdout.encoding,
        errors="backslashreplace",  # file names need not be valid text
        line_buffering=stdout.line_buffering,
    )


def _terminate(signal_number: int, frame: object) -> NoReturn:
    raise SystemExit(ExitCode.TERMINATED)


def main() -> NoReturn:
    """Entry point of `mooncake-p2p`."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        print("error: standard output is closed", file=sys.stderr)
        sys.exit(ExitCode.FAILED)
    signal.signal(signal.SIGTERM, _terminate)  # so that a stopped `get` still removes its file
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _with_named_errors(sys.stdout)
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no message lands in the typed command
        _end(complete(instruction))
    _end(run(sys.argv[1:]))


def complete(instruction: str) -> int:
    """Answer a shell's completion script."""
    from mooncake_p2p.commands.completion import answer

    return answer(instruction, os.environ)


def _end(status: int) -> NoReturn:
    """End the process at once: all is written and closed, and taking modules apart costs another 20 ms."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
