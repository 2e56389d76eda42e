"""Every command's help: examples that still parse, statuses that exist, and 80 columns."""

import re
import shlex
from typing import Any

import pytest

from mooncake_p2p.commands.join import SETTINGS
from mooncake_p2p.main import PROGRAM, LazyCommands
from mooncake_p2p.manual import COMMANDS, MANUAL, PAGES
from mooncake_p2p.output import ExitCode
from tests.command_line import Cli

EXAMPLES = [(name, line) for name, page in PAGES.items() for line, _ in page.examples]
OPERATORS = {"|", ">", "&&", ";"}


def arguments_in(line: str) -> list[str]:
    """The arguments that an example gives to the program, without the shell's part of it."""
    inside = re.search(r"\$\((.*)\)", line)
    words = shlex.split(inside[1] if inside else line)
    words = words[words.index(PROGRAM) + 1 :]
    end = next((at for at, word in enumerate(words) if word in OPERATORS), len(words))
    return words[:end]


def command_in(line: str, name: str) -> str:
    """The words in the place of the command, as many as its name has."""
    return " ".join(arguments_in(line)[: len(name.split())])


def test_every_heading_is_a_command() -> None:
    assert len(COMMANDS) == sum(not line.startswith(" ") for line in MANUAL.splitlines())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_examples_and_statuses(name: str) -> None:
    page = PAGES[name]
    assert 2 <= len(page.examples) <= 5
    assert all(command_in(line, name) == name and purpose for line, purpose in page.examples)
    numbers = [status for status, _ in page.statuses]
    assert numbers == sorted(set(numbers))
    assert set(numbers) <= {int(code) for code in ExitCode}
    assert {0, 1, 2, 130} <= set(numbers)


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_an_example_parses(name: str, line: str) -> None:
    command: Any = LazyCommands()[name]
    context = command.make_context(name, arguments_in(line)[len(name.split()) :])
    context.close()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_and_says_everything(
    name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli(*name.split(), "--help").out
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert re.search(rf"^Usage: {PROGRAM} {name}\b", text)
    for title in ("Examples:", "Exit status:", "Options:"):
        assert f"\n{title}\n" in text
    assert "<list[" not in text
    for option in ("socket", "namespace", "timeout"):
        # The last ones' --timeout and --namespace are about followers, and about whom a key is for.
        if f"--{option} " in text and name not in ("join", "config", "checkpoint update", "keygen"):
            assert f"MOONCAKE_P2P_{option.upper()}" in text


@pytest.mark.parametrize("name", ["join", "config"])
def test_help_shows_what_people_need_and_help_all_the_rest_in_groups(
    name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command: Any = LazyCommands()[name]
    options = {opt for each in command.params for opt in each.opts if opt.startswith("--")}
    short = cli(*name.split(), "--help").out
    shown = set(re.findall(r"^  (--[a-z-]+)", short, re.M)) & options
    everyday = {"--name", "--memory", "--bootstrap", "--invite", "--cluster-key-file", "--http"}
    assert everyday < shown
    assert len(shown) <= 12
    assert "--help-all" in shown
    whole = cli(*[*name.split(), "show", "--help-all"] if name == "config" else [name, "--help-all"]).out
    assert max(map(len, whole.splitlines())) <= 80
    assert options <= set(re.findall(r"(?<![\w-])--[a-z-]+", whole.partition("\nOptions:")[2]))
    for group in {each.group for each in SETTINGS.values()} - {"Options"}:
        assert f"\n{group}:\n" in whole
        assert f"\n{group}:\n" not in short


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    command: Any = LazyCommands()[name]
    for parameter in command.params:
        assert parameter.help, parameter.name


def test_help_is_also_a_command(cli: Cli) -> None:
    assert cli("help", "get").out == cli("get", "--help").out
    assert "Commands:" in cli("help").out
    assert "did you mean 'get'" in cli("help", "gte", status=ExitCode.USAGE).err.lower()
