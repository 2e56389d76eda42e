"""Limits of size and shape: they are lowered when the code gets better, and never raised.

Goals that are not reached yet: 72,000 shipped lines, 330 modules, 80,000 lines of tests.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.unit.test_docs import HEADLESS, VAGUE

ROOT: Final = Path(__file__).parents[2]
MOST_SHIPPED_LINES: Final = 101_900
MOST_TEST_LINES: Final = 101_100
MOST_MODULES: Final = 386
MOST_LINES_OF_A_MODULE: Final = 500
MOST_METHODS: Final = 25
MOST_LINES_OF_A_FUNCTION: Final = 60
MOST_PARAMETERS: Final = 7
MOST_WIDE_FUNCTIONS: Final = 5
"""Public signatures with more parameters: the API's own, and Mooncake's."""
MOST_NAMES_TWICE: Final = 3
MOST_VAGUE_WORDS: Final = 3
MOST_HEADLESS_SENTENCES: Final = 0


@cache
def sources(*folders: str) -> dict[Path, str]:
    return {
        path: path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def shipped() -> dict[Path, str]:
    return sources("p2pstore", "cli")


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, text in shipped().items():
        for node in ast.walk(ast.parse(text)):
            yield path, node


def place(path: Path, node: ast.stmt) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_the_house_does_not_grow() -> None:
    assert sum(text.count("\n") for text in shipped().values()) <= MOST_SHIPPED_LINES
    assert sum(text.count("\n") for text in sources("tests").values()) <= MOST_TEST_LINES
    assert len(shipped()) <= MOST_MODULES


def test_modules_classes_and_functions_are_of_a_size_to_read() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines"
        for path, text in shipped().items()
        if text.count("\n") > MOST_LINES_OF_A_MODULE
    ]
    wide = []
    for path, node in nodes():
        match node:
            case ast.ClassDef():
                methods = [x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
                if len(methods) > MOST_METHODS:
                    broken.append(f"{place(path, node)}: {len(methods)} methods")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    broken.append(f"{place(path, node)}: {lines} lines")
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                named = [each for each in given if each.arg not in ("self", "cls")]
                if len(named) > MOST_PARAMETERS and node.name != "__init__":
                    wide.append(f"{place(path, node)}: {len(named)} parameters")
    assert broken == []
    assert len(wide) <= MOST_WIDE_FUNCTIONS, wide


def test_no_two_folders_import_each_other() -> None:
    module_of = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources("p2pstore")
    }
    arrows: dict[str, set[str]] = defaultdict(set)
    for path, node in nodes():
        if isinstance(node, ast.ImportFrom) and node.module and path.name != "__init__.py":
            for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                if name in module_of:
                    arrows[folder(path)].add(folder(module_of[name]))
    pairs = [(a, b) for a in arrows for b in arrows[a] if a < b and a in arrows.get(b, ())]
    assert pairs == []


def folder(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else path.stem


def test_file_names_stand_once() -> None:
    names = Counter(path.name for path in shipped() if path.name != "__init__.py")
    twice = [name for name, count in names.items() if count > 1]
    assert len(twice) <= MOST_NAMES_TWICE, twice


PROSE: Final = re.compile(r'^ *r?"""(?:(?!""").)*"""$|(?<!["\'])#[^\n]*', re.MULTILINE | re.DOTALL)
WORD: Final = re.compile(r"[A-Za-z_]\w*")
REFERENCE: Final = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
CLASS: Final = re.compile(r"^class (\w+)([^:]*):((?:\n(?: .*)?)*)", re.MULTILINE)
MEMBER: Final = re.compile(r"\bself\.(\w+)|^    (?:async def |def |class )?(\w+)", re.MULTILINE)


def test_names_in_backticks_lead_somewhere() -> None:
    """Every part of a name is a word of the code. A dotted name begins with a class or module that has the rest, or
    with a name of the same file. A plain name with an underscore stands in its own top folder, the root or `client`."""
    code = {path: PROSE.sub("", text) for path, text in shipped().items()}
    used = {path: set(WORD.findall(text)) for path, text in code.items()}
    modules: dict[str, set[str]] = defaultdict(set)
    rooms: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path, text in code.items():
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[path.stem] |= used[path]
        rooms[parts[1] if len(parts) > 2 else ""] |= used[path]
        for outer, inner in pairwise(parts):
            modules[outer] |= {inner}
        for name, given, body in CLASS.findall(text):
            bases[name] |= set(WORD.findall(given)) - {name}
            classes[name] |= {a or b for a, b in MEMBER.findall(body)}
    known = set[str]().union(modules, *used.values())

    def has(owner: str, name: str) -> bool:
        return name in classes[owner] or any(has(base, name) for base in bases[owner] & {*classes})

    def leads(name: str, path: Path) -> bool:
        head, *rest = parts = name.split(".")
        if not known.issuperset(parts):
            return False
        if not rest:
            near = rooms.get(folder(path), known), rooms["client"], rooms[""], modules
            return "_" not in name.strip("_") or not name.islower() or any(name in each for each in near)
        if head in classes:
            return has(head, rest[0])
        if head in modules and head not in used[path]:
            return all(b in modules[a] for a, b in pairwise(parts) if a in modules)
        return head in WORD.findall(re.sub(r'"[^"\n]*"', "", code[path])) or name in everything

    everything = "".join(code.values())
    broken = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in shipped().items()
        for prose in PROSE.findall(text)
        for name in REFERENCE.findall(prose)
        if not leads(name, path)
    ]
    assert broken == []


def test_sentences_have_nouns_as_subjects() -> None:
    vague, headless = Counter[str](), Counter[str]()
    for path, text in {**shipped(), **sources("tests")}.items():
        said = [each[1] for each in re.finditer(r"(?<!['\"])#\s?(.*)", text)]
        said += [
            node.value.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]
        prose, name = "\n".join(said), str(path.relative_to(ROOT))
        headless[name] += sum(each.startswith(("What ", "Who ", "Whom ", "Whose ")) for each in said)
        vague[name] += len(VAGUE.findall(prose))
        headless[name] += len(HEADLESS.findall(prose))
    assert vague.total() <= MOST_VAGUE_WORDS, vague.most_common(10)
    assert headless.total() <= MOST_HEADLESS_SENTENCES, headless.most_common(10)
