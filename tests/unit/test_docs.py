"""Documents agree with the program: links, commands, settings, names and messages exist; lengths hold."""

import ast
import importlib
import re
import shlex
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

import p2pstore
from mooncake_p2p.main import LazyCommands
from mooncake_p2p.manual import COMMANDS
from p2pstore.config import PeerConfig
from p2pstore.settings import PEOPLES_NAMES
from tests.pages import DOCS, ROOT, Block, blocks, documents, pages, prose, steps

LINK: Final = re.compile(r"\[[^\]]*\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
IDENTIFIER: Final = re.compile(r"^::: (\S+)$", re.MULTILINE)
INLINE_COMMAND: Final = re.compile(r"`(mooncake-p2p [^`]+)`")
INLINE_OPTION: Final = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
FOREIGN: Final = {
    *("--device", "--cap-add", "--ulimit", "--ipc")  # docker's
}
METRIC: Final = re.compile(r"`(p2pstore_[a-z_]+)`")
ALERT: Final = re.compile(r"`(P2PStore(?!Error)[A-Z]\w+)`")
SHORTEST_MESSAGE: Final = 20
ENGINES: Final = ("vllm", "sglang", "lmcache")
"""Their plug-ins import the engine, which is not installed here."""


def everywhere(*kinds: str) -> list[Block]:
    return [block for page in documents() for block in blocks(page, *kinds)]


# --- links ---------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\- ]", "", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(map(slug, HEADING.findall(prose(page))))


@pytest.mark.parametrize(
    "page", [*documents(), ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.finditer(prose(page)):
        if "://" in link["path"]:
            continue
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        assert target.exists(), link[0]
        assert target.is_relative_to(ROOT), link[0]
        if link["anchor"]:
            assert link["anchor"] in anchors(target), link[0]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    own = {"architecture.md", "changelog.md", "contributing.md", "readme.md"}
    named = set(re.findall(r"[\w/-]+\.md", navigation)) - own
    assert {str(page.relative_to(DOCS)) for page in pages()} == named


def test_figures_are_those_of_the_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    importlib.import_module("docs_figures").write(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "figures").iterdir()}
    assert drawn == kept, "run scripts/docs_figures.py"
    for figure in drawn.values():
        xml.etree.ElementTree.fromstring(figure)


# --- lengths and English -------------------------------------------------------------------------

MOST_WORDS: Final = {
    "README.md": 1_500,
    "ARCHITECTURE.md": 3_000,
    "docs/design": 1_500,
    "docs/decisions": 400,
}
MOST_WORDS_IN_ALL: Final = 30_000
MOST_WORDS_IN_A_PARAGRAPH: Final = 90
MOST_VAGUE_WORDS: Final = 5
VAGUE: Final = re.compile(
    r"\b(somebody|nobody|whoever|anybody|everybody|so (?:many|much|long|few|often|seldom))\b", re.I
)

HEADLESS: Final = re.compile(
    r"(?:^|[.;:(\"]\s*)(?:Who|What|who|what) (?:[a-z]+s|is|was|are|had|has|came|can|may|wants?)\b", re.M
)


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("place", MOST_WORDS)
def test_documents_keep_their_lengths(place: str) -> None:
    path = ROOT / place
    for each in sorted(path.glob("*.md")) if path.is_dir() else [path]:
        assert words(each) <= MOST_WORDS[place], f"{each.name}: {words(each)} words"


def test_all_documents_together_keep_their_length() -> None:
    read = [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")), *pages()]
    assert sum(map(words, read)) <= MOST_WORDS_IN_ALL


def test_paragraphs_are_short() -> None:
    for page in [*documents(), ROOT / "CHANGELOG.md"]:
        for line in prose(page).splitlines():
            if not line.startswith("|"):
                assert len(line.split()) <= MOST_WORDS_IN_A_PARAGRAPH, f"{page.name}: {line[:60]}"


def test_subjects_are_nouns() -> None:
    for page in [*documents(), ROOT / "CHANGELOG.md"]:
        assert not HEADLESS.findall(prose(page)), page.name
    found = [f"{page.name}: {word}" for page in documents() for word in VAGUE.findall(prose(page))]
    assert len(found) <= MOST_VAGUE_WORDS, found


def test_every_module_is_in_the_tree() -> None:
    """A line for each folder, which names all of its modules, and none that is gone; of the simulator's only some."""
    tree = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- `([\w/]+/)`(.*)", tree, re.MULTILINE)
    found = {folder: sorted(re.findall(r"`(\w+)`", line)) for folder, line in lines}
    modules: dict[str, list[str]] = {"cli/": []}
    for path in [*(ROOT / "p2pstore").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        named = modules.setdefault(f"{path.parent.relative_to(ROOT)}/", [])
        if not path.name.startswith("__"):
            named.append(path.stem)
    for folder in ("simulation/", "simulation/measures/"):
        assert set(found.pop(folder)) <= {path.stem for path in (ROOT / folder).glob("*.py")}
    assert found == {folder: sorted(names) for folder, names in modules.items()}


def test_every_module_that_the_architecture_names_exists() -> None:
    """Paths below `p2pstore/` without that prefix, or from the root."""
    for page in (ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(DOCS / "design").glob("*.md")):
        for name in re.findall(r"`([\w/]+/[\w]+\.(?:py|json))`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file() or (ROOT / "p2pstore" / name).is_file(), (
                f"{page.name}: {name}"
            )


# --- commands ------------------------------------------------------------------------------------


def split_command(line: str) -> list[list[str]]:
    """The mooncake-p2p commands in a line of shell, as words."""
    found: list[list[str]] = []
    words = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    words.whitespace_split = True
    words.commenters = "#"
    current: list[str] | None = None
    for word in words:
        if re.fullmatch(r"[;&|<>()]+", word):
            current = None
        elif current is not None:
            current.append(word)
        elif word == "mooncake-p2p":
            current = []
            found.append(current)
    return found


def check_command(words: list[str], where: str, *, whole: bool) -> None:
    """`whole`: all that it needs is there; else it is enough that what is there exists."""
    two = " ".join(words[:2])
    name = two if two in COMMANDS else words[0]
    assert name in COMMANDS, f"{where}: {words}"
    command: Any = LazyCommands()[name]
    rest = words[len(name.split()) :]
    if whole:
        try:
            command.make_context(name, list(rest))
        except Exception as error:
            raise AssertionError(f"{where}: mooncake-p2p {shlex.join(words)}: {error}") from error
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    for word in rest:
        if word.startswith("-") and word != "-":
            assert word.partition("=")[0] in options | {"--help", "-h"}, f"{where}: {word}"


def shell_lines() -> Iterator[tuple[str, str]]:
    for block in everywhere("bash"):
        yield from ((line, str(block)) for line in block.text.splitlines())
    for block in everywhere("console"):
        yield from ((step.command, str(block)) for step in steps(block))


def test_every_command_line_is_one() -> None:
    seen = set()
    for line, where in shell_lines():
        for words in split_command(line):
            check_command(words, where, whole=True)
            seen.add(words[0])
    assert len(seen) > 15


def test_every_command_within_the_text_exists() -> None:
    for page in documents():
        for line in INLINE_COMMAND.findall(prose(page)):
            if line != "mooncake-p2p help COMMAND":
                check_command(shlex.split(line)[1:], page.name, whole=False)


def test_every_option_within_the_text_exists() -> None:
    known = FOREIGN | {"--help"}
    for name in COMMANDS:
        command: Any = LazyCommands()[name]
        known |= {option for each in command.params for option in each.opts}
    for page in documents():
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            if not code.startswith(("rsync", "ruff", "scripts/")):
                assert set(INLINE_OPTION.findall(code)) <= known, f"{page.name}: {code}"


def test_every_script_exists() -> None:
    for page in documents():
        for name in re.findall(r"scripts/\w+", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file() or (ROOT / f"{name}.py").is_file(), f"{page.name}: {name}"


def test_every_setting_exists() -> None:
    found = everywhere("toml")
    assert found
    known = {*PeerConfig.__struct_fields__, *PEOPLES_NAMES.values()}
    for block in found:
        assert set(tomllib.loads(block.text)) <= known, str(block)


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", everywhere("python"), ids=str)
def test_python_uses_names_that_exist(block: Block) -> None:
    """Commands are run in tests/cluster/test_first_ten_minutes.py; here, imports and clients' methods are looked up."""
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, each.name) for each in node.names), str(block)
        elif isinstance(node, ast.Import):
            for each in node.names:
                importlib.import_module(each.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"p2pstore": p2pstore, "client": p2pstore.BlockingClient, "peer": p2pstore.Peer}
            if node.value.id in owner:
                assert hasattr(owner[node.value.id], node.attr), f"{block}: {node.attr}"


def find(name: str) -> object:
    """The object that a dotted name stands for; raises when there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def test_the_reference_names_what_exists_and_is_documented() -> None:
    names = [name for page in pages() for name in IDENTIFIER.findall(prose(page))]
    assert len(names) > 15
    for name in names:
        if name.endswith(ENGINES):
            assert ast.get_docstring(
                ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text("utf-8"))
            )
        else:
            assert getattr(find(name), "__doc__", None), name


def test_all_public_names_are_in_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    within = {"p2pstore.errors", "p2pstore.results"}  # modules that are shown whole
    named = set(IDENTIFIER.findall(text))
    assert within <= named
    for name in set(p2pstore.__all__) - {"__version__", "aio", "blocking"}:
        found = getattr(p2pstore, name)
        assert found.__module__ in within or f"{found.__module__}.{found.__qualname__}" in named, name


# --- what the program says -----------------------------------------------------------------------


def words_of(node: ast.AST) -> str | None:
    """A string in the source, with … for whatever is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\(\w+\))?[-\d.,]*[sdrfgx]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(each) or "…" for each in node.values)
    return None


@cache
def said() -> str:
    """Every string of the program, a line each."""
    found = []
    for path in [*(ROOT / "p2pstore").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (text := words_of(node)) is not None:
                found.append(" ".join(text.split()))
    return "\n".join(found)


def test_every_message_is_one_of_the_program() -> None:
    messages = [
        (line, str(block)) for block in everywhere("message") for line in block.text.splitlines()
    ]
    assert len(messages) > 30
    for line, where in messages:
        assert len(line) >= SHORTEST_MESSAGE, where
        assert line in said(), f"{where}: {line}"


def test_every_metric_and_alert_exists() -> None:
    """Metrics: those of alert rules and dashboard, of which tests/cluster/test_prometheus.py knows that they exist."""
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8")
    dashboard = (ROOT / "deploy/grafana/p2pstore.json").read_text(encoding="utf-8")
    metrics = set(re.findall(r"p2pstore_[a-z_]+", alerts + dashboard))
    metrics |= {name.removesuffix("_bucket") for name in metrics}
    found = [(name, page.name) for page in pages() for name in METRIC.findall(prose(page))]
    assert len(found) > 5
    for name, where in found:
        assert name in metrics, f"{where}: {name}"
    for page in pages():
        for name in ALERT.findall(prose(page)):
            assert f"alert: {name}\n" in alerts, f"{page.name}: {name}"
