"""`help`, and `completion` with the Tab key: scripts for bash, zsh and fish, and the words that they ask for.

Protocol. The script sets `_MOONCAKE_P2P_COMPLETE=complete_SHELL` and `COMP_WORDS`, the command line up to the cursor.
The answer is one candidate a line, with a tab and a description for zsh and fish. A line of one tab says that file
names are no candidates either; an answer without any line leaves the word to the shell's completion of files.

The answer never fails and writes nothing to stderr: a message would land in the middle of the typed command.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from mooncake_p2p.main import COMPLETION_VARIABLE, FILE_METAVARS, PROGRAM, LazyCommands
from mooncake_p2p.manual import COMMANDS
from mooncake_p2p.options import argument

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

LOOK_SECONDS: Final = 0.15
"""How long peer and machine may take to answer: with the start of this process, Tab takes under 0.3 s."""
MAX_CANDIDATES: Final = 100
NO_FILES: Final = "\t"
GLOBAL_OPTIONS: Final = ("--version", "--debug", "--help")

SCRIPTS: Final = {
    "bash": """\
%(function)s() {
    local typed="${COMP_WORDS[*]:0:COMP_CWORD+1}" line
    [[ -z $COMP_LINE ]] || typed=${COMP_LINE:0:COMP_POINT}
    compopt -o default 2>/dev/null
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == $'\\t' ]]; then compopt +o default 2>/dev/null; else COMPREPLY+=("$line"); fi
    done < <(COMP_WORDS="$typed" COMP_WORDBREAKS="$COMP_WORDBREAKS" %(variable)s=complete_bash "$1" 2>/dev/null)
    return 0
}

complete -o default -F %(function)s %(program)s""",
    "zsh": """\
#compdef %(program)s

%(function)s() {
  local -a described
  local answer line
  answer="$(COMP_WORDS="${(j: :)words[1,CURRENT]}" %(variable)s=complete_zsh "${words[1]}" 2>/dev/null)"
  [[ -n $answer ]] || { _files; return }
  for line in "${(@f)answer}"; do
    [[ $line == $'\\t' ]] && continue
    described+=("${${line%%%%$'\\t'*}//:/\\\\:}${${(M)line:#*$'\\t'*}:+:${line#*$'\\t'}}")
  done
  _describe 'candidates' described
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef %(function)s %(program)s""",
    "fish": """\
function %(function)s
    set -l typed (commandline -cp | string collect)
    set -l answer (env COMP_WORDS="$typed" %(variable)s=complete_fish %(program)s 2>/dev/null)
    if set -q answer[1]
        printf '%%s\\n' $answer | string match --invert \\t
    else
        __fish_complete_path (commandline -ct)
    end
end

complete --command %(program)s --no-files --arguments '(%(function)s)'""",
}


def script(shell: str) -> str:
    """The script that `shell` (bash, zsh, fish) evaluates at its start."""
    return SCRIPTS[shell] % {
        "function": f"_{PROGRAM.replace('-', '_')}_completion",
        "variable": COMPLETION_VARIABLE,
        "program": PROGRAM,
    }


def answer(instruction: str, environment: Mapping[str, str]) -> int:
    """Print what a shell's script asked for. Returns the exit status."""
    if "_TYPER_COMPLETE_ARGS" in environment:  # an earlier version's script: it would run the answer
        return 1
    try:
        typed = _split(environment.get("COMP_WORDS", ""), environment.get("COMP_CWORD"))
        found = candidates(*typed)
        print("".join(f"{line}\n" for line in _lines(found, instruction, environment)), end="")
        sys.stdout.flush()
    except Exception:  # see above: no message may land in the typed command
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Completions of a word: value -> description. `replaced`: the word as far as it was typed."""

    values: Mapping[str, str]
    replaced: str = ""
    files: bool = False


@dataclass(slots=True)
class _Typed:
    """The words before the one to complete, as options and arguments of its command."""

    command: str
    options: dict[str, str] = field(default_factory=dict)
    arguments: int = 0


def _split(line: str, place: str | None) -> tuple[list[str], str]:
    """The words before the cursor without the program's name, and the word at the cursor."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
        begins_anew = not line or line[-1].isspace()
    except ValueError:  # within quotes, or behind a backslash
        words.append(lexer.token)
        begins_anew = False
    if begins_anew or (place is not None and place.isdigit() and len(words) == int(place)):
        words.append("")
    return words[1:-1], words[-1]


def _lines(found: Candidates, shell: str, environment: Mapping[str, str]) -> Iterator[str]:
    """The answer to the shell. bash replaces the word only from its last break character on."""
    skipped = 0
    if shell == "complete_bash":
        breaks = set(environment.get("COMP_WORDBREAKS", "")) - set(" \t\n\"'")
        skipped = max((found.replaced.rfind(each) + 1 for each in breaks), default=0)
    for value, description in found.values.items():
        told = f"\t{description}" if description and shell != "complete_bash" else ""
        yield value[skipped:] + told
    if not found.values and not found.files:
        yield NO_FILES


# --- which word it is --------------------------------------------------------------------------


def candidates(words: Sequence[str], word: str) -> Candidates:
    left = [each for each in words if each not in GLOBAL_OPTIONS[:2]]
    if not left:
        found = dict.fromkeys(GLOBAL_OPTIONS, "") if word.startswith("-") else commands_below("")
        return _beginning(found, word)
    if left[0] == "help":
        return _beginning(commands_below("".join(f"{each} " for each in left[1:])), word)
    if len(left) == 1:  # the second word of a command, or an option of the command of one word
        second = commands_below(f"{left[0]} ")
        if second and (left[0] not in COMMANDS or not word.startswith("-")):
            return _beginning(second, word)
    two = " ".join(left[:2])
    command = two if two in COMMANDS else left[0]
    if command not in COMMANDS:
        return Candidates({})
    return _of_command(_Typed(command), left[len(command.split()) :], word)


def commands_below(first: str) -> dict[str, str]:
    """The words that may stand behind `first` in the name of a command, with their summaries."""
    found: dict[str, str] = {}
    for name, (_, summary) in COMMANDS.items():
        if name.startswith(first):
            next_word, _, more = name.removeprefix(first).partition(" ")
            if not more:
                found[next_word] = summary
            else:
                found.setdefault(next_word, f"Commands that begin with {next_word}.")
    return found


def _of_command(typed: _Typed, words: Sequence[str], word: str) -> Candidates:
    parameters = LazyCommands()[typed.command].params
    options = {
        name: each for each in parameters if each.param_type_name == "option" for name in each.opts
    }
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    waiting: Any = None  # the option whose value comes next
    only_arguments = False
    for each in words:
        name, equals, value = each.partition("=")
        if waiting is not None:
            typed.options[waiting.name] = each
            waiting = None
        elif each == "--" and not only_arguments:
            only_arguments = True
        elif only_arguments or not each.startswith("-") or each == "-":
            typed.arguments += 1
        elif name in options and not options[name].is_flag:
            if equals:
                typed.options[options[name].name] = value
            else:
                waiting = options[name]
    if waiting is not None:
        return _values(typed, waiting, word)
    if word.startswith("-") and not only_arguments:
        name, equals, value = word.partition("=")
        if equals and name in options:
            return _values(typed, options[name], value, before=f"{name}=")
        return _beginning(
            {name: _short(each.help or "") for name, each in options.items() if len(name) > 2}
            | {"--help": "Show this message and exit"},
            word,
        )
    if not arguments or (typed.arguments >= len(arguments) and arguments[-1].nargs == 1):
        return Candidates({})
    return _values(typed, arguments[min(typed.arguments, len(arguments) - 1)], word)


def _values(typed: _Typed, parameter: Any, word: str, before: str = "") -> Candidates:
    """The completions of an option's or argument's value."""
    files = any(each in (parameter.metavar or "") for each in FILE_METAVARS)
    found = list(getattr(parameter.type, "choices", ()))
    source = SOURCES.get(parameter.name)
    if parameter.name == "name" and typed.command.startswith("checkpoint "):
        source = CHECKPOINTS
    if not found and source is not None:
        found = in_time(source(typed.options, word))
    values = {f"{before}{each}": "" for each in found if each.startswith(word)}
    return Candidates(values, before + word, files)


def _beginning(found: Mapping[str, str], word: str) -> Candidates:
    return Candidates({value: text for value, text in found.items() if value.startswith(word)}, word)


def _short(text: str) -> str:
    return text.partition("  [")[0].partition(" [default")[0].rstrip(".")


# --- what the machine and the peer know --------------------------------------------------------

Options = Mapping[str, str]
Source = Callable[[Options, str], Iterable[str]]


def in_time(found: Iterable[str]) -> list[str]:
    """The values that come within `LOOK_SECONDS` and are one word for the shell, sorted."""
    taken: set[str] = set()
    with contextlib.suppress(Exception), _time_limit(LOOK_SECONDS):
        for each in found:
            taken.add(each)
    return sorted(each for each in taken if shlex.quote(each) == each)


def _of_peer(question: Callable[[BlockingClient, str], Iterable[str]]) -> Source:
    def ask(options: Options, word: str) -> Iterable[str]:
        from p2pstore.errors import P2PStoreError
        from p2pstore.local.socket_paths import answers, find_socket, socket_of

        try:
            named = options.get("peer_name")
            path = socket_of(named) if named else find_socket(options.get("socket"))
        except P2PStoreError:
            return ()
        if not answers(path):  # the client takes a tenth of a second to load
            return ()
        from p2pstore import blocking

        namespace = options.get("namespace") or os.environ.get("MOONCAKE_P2P_NAMESPACE")

        def found() -> Iterator[str]:
            with blocking.connect(
                path, namespace=namespace or "default", timeout=LOOK_SECONDS
            ) as client:
                yield from question(client, word)

        return found()

    return ask


def _keys(client: BlockingClient, word: str) -> Iterator[str]:
    """Those of the local peer, then those of all peers as far as they answer in time."""
    for local in (True, False):
        page = client.list_keys(word, limit=MAX_CANDIDATES, local=local)
        yield from (entry.key for entry in page.keys)


def _checkpoints(client: BlockingClient, word: str) -> Iterator[str]:
    """Names; behind an @, with their versions."""
    for each in client.checkpoints.names():
        yield f"{each.name}@{each.version}" if "@" in word else each.name


def _live() -> list[Path]:
    from p2pstore.local.socket_paths import live_sockets

    return live_sockets()


def _names_in(folder: str) -> Source:
    return lambda options, word: (each.name for each in Path(folder).glob("*"))


def _groups(options: Options, word: str) -> Iterable[str]:
    import grp

    return (each.gr_name for each in grp.getgrall())


CHECKPOINTS: Final = _of_peer(_checkpoints)
_PEER_IDS: Final = _of_peer(lambda client, word: (each.peer_id for each in client.peers()))
_ADDRESSES: Final = _of_peer(
    lambda client, word: (address for each in client.peers() for address in each.control)
)
SOURCES: Final[Mapping[str, Source]] = {
    **dict.fromkeys(("key", "keys", "after", "prefix"), _of_peer(_keys)),
    **dict.fromkeys(("publisher", "forget"), _PEER_IDS),
    **dict.fromkeys(("peer", "bootstrap"), _ADDRESSES),
    "socket": lambda options, word: map(str, _live()),
    "peer_name": lambda options, word: (path.stem for path in _live()),
    "interface": _names_in("/sys/class/net"),
    "rdma_device": _names_in("/sys/class/infiniband"),
    "socket_group": _groups,
}
"""By the name of the option or argument."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in the body when it takes longer, whatever it waits for."""

    def stop(number: int, frame: object) -> NoReturn:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# --- the commands ------------------------------------------------------------------------------


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
    print(script(shell.value))
