"""Which files of a directory or a version are meant, by patterns. Pure.

A pattern is for a whole relative path, and `*` in it matches anything, `/` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from p2pstore.checkpoint.manifest import Manifest

NAMED_FILES: Final = 8


def is_chosen(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a path matches some of `include`, if there are any, and none of `exclude`."""
    if any(fnmatchcase(path, pattern) for pattern in exclude):
        return False
    return not include or any(fnmatchcase(path, pattern) for pattern in include)


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
