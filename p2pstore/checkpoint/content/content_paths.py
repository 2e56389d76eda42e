"""Valid names of files, and patterns that choose files. Pure.

A manifest's paths are created below a directory of the fetching peer, so they are plain: relative, without `..`. A
manifest has no links. A pattern is for a whole relative path, and `*` in it matches anything, `/` too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from p2pstore.errors import CheckpointRefused

if TYPE_CHECKING:
    from p2pstore.checkpoint.content.manifest import Manifest

MAX_PATH_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
"""Of one part of a path, as in file systems."""
MAX_DEPTH: Final = 32
CURRENT: Final = "current"
"""The link to the version in use, where versions are kept."""
RESERVED_PREFIX: Final = ".p2pstore"
"""Prefix of the fetching peer's own files beside the published ones."""


_PLAIN_PART: Final = r"[\w\-+=,@~ ][\w.\-+=,@~ ]*"
_PLAIN: Final = re.compile(f"{_PLAIN_PART}(?:/{_PLAIN_PART})*", re.ASCII)
"""Short paths of these characters need no further check."""


def check_path(path: str) -> None:
    """Raises `CheckpointRefused` for a path that is not plain and relative, with the reason."""
    if len(path) <= MAX_NAME_BYTES and path.count("/") < MAX_DEPTH and _PLAIN.fullmatch(path):
        return
    if not path or len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise CheckpointRefused(f"a path is 1 to {MAX_PATH_BYTES:,} bytes long: {path[:80]!r}")
    if path.startswith("/"):
        raise CheckpointRefused(f"an absolute path: {path[:80]!r}")
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        raise CheckpointRefused(f"a path of {len(parts)} parts; at most {MAX_DEPTH} are allowed")
    for part in parts:
        _check_part(part, path)
    if parts[0].startswith(RESERVED_PREFIX):
        raise CheckpointRefused(f"names in {RESERVED_PREFIX}* are reserved: {path[:80]!r}")


def check_paths(paths: Sequence[str]) -> None:
    """Check each path; and that they are in order, each once, none below another. Raises `CheckpointRefused`."""
    files = set(paths)
    for path in paths:
        check_path(path)
        end = path.rfind("/")
        while end > 0:
            if path[:end] in files:
                raise CheckpointRefused(f"{path[:end]!r} is a file, and {path[:80]!r} is below it")
            end = path.rfind("/", 0, end)
    for first, second in pairwise(paths):
        if first >= second:
            raise CheckpointRefused(f"paths are in order, each once: {second[:80]!r} comes too late")


def _check_part(part: str, path: str) -> None:
    if part in ("", ".", ".."):
        raise CheckpointRefused(f"a path with the part {part!r}: {path[:80]!r}")
    if len(part.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise CheckpointRefused(f"a part of a path is at most {MAX_NAME_BYTES} bytes: {part[:80]!r}")
    if any(ord(character) < 32 or ord(character) == 127 for character in part) or "\\" in part:
        raise CheckpointRefused(f"control characters or backslashes in a path: {path[:80]!r}")
    if any("\ud800" <= character <= "\udfff" for character in part):
        raise CheckpointRefused(f"a path that is not UTF-8: {path[:80]!r}")


NAMED_FILES: Final = 8
NEAREST: Final = 3
"""Names suggested by an error."""
MOST_COMPARED: Final = 5_000
"""Names compared letter by letter; 0.3 s."""
WILDCARDS: Final = frozenset("*?[")


BOOKKEEPING_FOLDERS: Final = (".git", ".cache/huggingface", ".locks", ".hg", ".svn")
BOOKKEEPING_SUFFIXES: Final = (".incomplete", ".lock", ".crdownload", ".aria2")


def bookkeeping_in(path: str) -> str:
    """The folder or suffix that marks a path as bookkeeping of a download or version control; empty for others."""
    around = f"/{path}/"
    for folder in BOOKKEEPING_FOLDERS:
        if f"/{folder}/" in around:
            return folder
    return next((suffix for suffix in BOOKKEEPING_SUFFIXES if path.endswith(suffix)), "")


def is_asked_for(path: str, mark: str, include: Sequence[str]) -> bool:
    """Whether a pattern with such a mark matches the path: then the file is wanted."""
    return any(mark in pattern and fnmatchcase(path, pattern) for pattern in include)


def is_chosen(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a path matches some `include`, if there are any, and no `exclude`."""
    if matches(path, exclude):
        return False
    return not include or matches(path, include)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name equals or matches one of these patterns (it may contain brackets itself)."""
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def choose_files(
    manifest: Manifest, include: Sequence[str], exclude: Sequence[str]
) -> frozenset[int] | None:
    """Numbers of the chosen files; None for all. Raises `ValueError` when no file is chosen, naming some that exist."""
    chosen = frozenset(
        number for number, file in enumerate(manifest.files) if is_chosen(file.path, include, exclude)
    )
    if not chosen:
        named = ", ".join(repr(file.path) for file in manifest.files[:NAMED_FILES])
        more = len(manifest.files) - NAMED_FILES
        raise ValueError(
            f"no file of checkpoint {manifest.name!r} matches; it has {named}"
            + (f" and {more:,} more" if more > 0 else "")
        )
    return None if len(chosen) == len(manifest.files) else chosen


def unmatched(paths: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The patterns without a match."""
    found = []
    for pattern in patterns:
        if pattern in paths:
            continue
        if not WILDCARDS & set(pattern) or not any(fnmatchcase(path, pattern) for path in paths):
            found.append(pattern)
    return found


def nearest(wanted: str, known: Collection[str]) -> str:
    """Suggestions for a name or pattern without a match, to be appended to an error."""
    plain = wanted.strip("*?").lower()
    like = [name for name in known if plain and plain in name.lower()]
    if not like:
        last = plain.rpartition(".")[2]
        pool = known
        if len(known) > MOST_COMPARED:
            pool = [name for name in known if last and last in name.lower()][:MOST_COMPARED]
        lowered = {name.lower(): name for name in pool}
        like = [lowered[each] for each in get_close_matches(plain, lowered, NEAREST, 0.4)]
    if like:
        shown = sorted(like, key=lambda name: (abs(len(name) - len(plain)), name))[:NEAREST]
        return f"; nearest: {', '.join(map(repr, shown))}"
    if not known:
        return "; there is none at all"
    shown = sorted(known)[:NEAREST]
    more = len(known) - len(shown)
    return f"; there are {', '.join(map(repr, shown))}" + (f" and {more:,} more" if more else "")
