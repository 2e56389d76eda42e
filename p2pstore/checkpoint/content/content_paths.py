"""Which names a manifest may give to files and checkpoints. Pure.

What a manifest names is created below a directory of whoever fetches it. So a path is plain: relative, made of
names, going nowhere but down. There are no links in a manifest at all.
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
"""Of one part of a path, as file systems have it, and of a checkpoint's name."""
MAX_DEPTH: Final = 32
CURRENT: Final = "current"
"""The link to the version that counts, where versions are kept."""
RESERVED_PREFIX: Final = ".p2pstore"
"""Files of the one who fetches, beside what was published, begin like this."""


_PLAIN_PART: Final = r"[\w\-+=,@~ ][\w.\-+=,@~ ]*"
_PLAIN: Final = re.compile(f"{_PLAIN_PART}(?:/{_PLAIN_PART})*", re.ASCII)
"""Paths that need no look at each of their characters, as long as they are short."""


def check_path(path: str) -> None:
    """Raises `CheckpointRefused` for what is not a plain relative path, saying why."""
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
    """Each of them, and all together: in order, none twice, none below another. Raises `CheckpointRefused`."""
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
            raise CheckpointRefused(
                f"paths are in order, each once: {second[:80]!r} comes too late"
            )


def check_checkpoint_name(name: str) -> None:
    """Raises `CheckpointRefused` for what cannot name a checkpoint: `@` ends a name, before a version."""
    length = len(name.encode(errors="surrogatepass"))
    if not 1 <= length <= MAX_NAME_BYTES or not name.isprintable() or set(name) & set("@ "):
        raise CheckpointRefused(
            f"a checkpoint's name is 1 to {MAX_NAME_BYTES} bytes, printable, without spaces and @: {name[:80]!r}"
        )


def _check_part(part: str, path: str) -> None:
    if part in ("", ".", ".."):
        raise CheckpointRefused(f"a path with the part {part!r}: {path[:80]!r}")
    if len(part.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise CheckpointRefused(
            f"a part of a path is at most {MAX_NAME_BYTES} bytes: {part[:80]!r}"
        )
    if any(ord(character) < 32 or ord(character) == 127 for character in part) or "\\" in part:
        raise CheckpointRefused(f"control characters or backslashes in a path: {path[:80]!r}")
    if any("\ud800" <= character <= "\udfff" for character in part):
        raise CheckpointRefused(f"a path that is not UTF-8: {path[:80]!r}")


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
