"""The documents and their parts, for the tests that compare them with the program."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
_FENCE: Final = re.compile(r"^```(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its kind (`bash`, `console`, `python`, `toml`, `message`, ...) and what is in it."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a `console` block, and what the page says that it prints."""

    command: str
    printed: str


def pages() -> list[Path]:
    """All pages."""
    return sorted(DOCS.rglob("*.md"))


def documents() -> list[Path]:
    """All pages, and the documents of the root but for the changelog."""
    return [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")), *pages()]


def blocks(page: Path, *kinds: str) -> list[Block]:
    """Its fenced blocks of these kinds, all without any, in order."""
    text = page.read_text(encoding="utf-8")
    found = (
        Block(page.name, text.count("\n", 0, fence.start()) + 1, fence["kind"], fence["text"])
        for fence in _FENCE.finditer(text)
    )
    return [block for block in found if not kinds or block.kind in kinds]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def steps(block: Block) -> Iterator[Step]:
    """The commands of a `console` block, each with its output; a line that ends with a backslash goes on."""
    command, printed = "", list[str]()
    for line in block.text.splitlines():
        if command.endswith("\\"):
            command += "\n" + line
        elif line.startswith("$ "):
            if command:
                yield Step(command, "\n".join(printed))
            command, printed = line.removeprefix("$ "), []
        else:
            printed.append(line)
    if command:
        yield Step(command, "\n".join(printed))
