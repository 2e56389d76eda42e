"""Which files of a directory or a version are meant, by patterns. Pure.

A pattern is for a whole relative path, and `*` in it matches anything, `/` too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from p2pstore.checkpoint.content.manifest import Manifest

NAMED_FILES: Final = 8
NEAREST: Final = 3
"""Names that an error suggests."""
MOST_COMPARED: Final = 5_000
"""Names that are compared letter by letter; 0.3 s."""
WILDCARDS: Final = frozenset("*?[")


BOOKKEEPING_FOLDERS: Final = (".git", ".cache/huggingface", ".locks", ".hg", ".svn")
BOOKKEEPING_SUFFIXES: Final = (".incomplete", ".lock", ".crdownload", ".aria2")


def bookkeeping_in(path: str) -> str:
    """What makes a path one of a download's or a version control's own, which nobody who fetches needs: the name of a
    folder, or a suffix; empty for others."""
    around = f"/{path}/"
    for folder in BOOKKEEPING_FOLDERS:
        if f"/{folder}/" in around:
            return folder
    return next((suffix for suffix in BOOKKEEPING_SUFFIXES if path.endswith(suffix)), "")


def is_asked_for(path: str, mark: str, include: Sequence[str]) -> bool:
    """Whether a pattern that names such a mark matches the path: then it is wanted all the same."""
    return any(mark in pattern and fnmatchcase(path, pattern) for pattern in include)


def is_chosen(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a path matches some of `include`, if there are any, and none of `exclude`."""
    if matches(path, exclude):
        return False
    return not include or matches(path, include)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name is one of these patterns (it may have brackets itself), or matches one."""
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def choose_files(
    manifest: Manifest, include: Sequence[str], exclude: Sequence[str]
) -> frozenset[int] | None:
    """The numbers of the files that are chosen; None when all of them are. Raises `ValueError` when none is, naming
    some that there are."""
    chosen = frozenset(
        number
        for number, file in enumerate(manifest.files)
        if is_chosen(file.path, include, exclude)
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
    """The patterns that match none of these."""
    found = []
    for pattern in patterns:
        if pattern in paths:
            continue
        if not WILDCARDS & set(pattern) or not any(fnmatchcase(path, pattern) for path in paths):
            found.append(pattern)
    return found


def nearest(wanted: str, known: Collection[str]) -> str:
    """What may have been meant by a name or pattern that nothing matches, to be appended to an error; else some of
    what there is."""
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
