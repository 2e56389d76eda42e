"""A look at what is to be published, before it is: what its user should know, and what would be no checkpoint. Shell;
blocking, for the publisher's own process.

Only small parts of files are read: indexes, headers, and the beginnings of files that are too short to be what they are
called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.safetensors import (
    HEAD_BYTES,
    INDEX_SUFFIX,
    SUFFIX,
    BrokenFile,
    header_end,
    likely_cause,
    path_in_index,
    read_header,
    read_weight_map,
)
from p2pstore.checkpoint.content.source_directory import SourceDirectory, SourceFile
from p2pstore.checkpoint.swarm.choosing import WILDCARDS, nearest, unmatched
from p2pstore.errors import CheckpointRefused

MOST_LOOKED_INTO: Final = 4096
"""Files of one directory."""
MOST_NOTES: Final = 32
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
MAX_HEADER_READ: Final = 8 * 1024 * 1024
"""A longer header is not read in full; its length is looked at."""
POINTER_BYTES: Final = 4096
"""What stands for a file is shorter: git-LFS pointers, error pages."""
INDEXES: Final = (SUFFIX + INDEX_SUFFIX, ".bin" + INDEX_SUFFIX)
"""How indexes of tensors are called."""
UNFINISHED: Final = (".incomplete", ".part", ".tmp", ".download", ".crdownload", ".aria2")
"""How the names of files end that are being downloaded."""
HUB_DOWNLOADS: Final = ".cache/huggingface/download"
SUSPECTED: Final = re.compile(
    r"\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|npz|model|json)$", re.IGNORECASE
)
NAMED: Final = 4
"""Of many, that a text names."""


def inspect(source: SourceDirectory, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """What is to be known of the files that are chosen, a sentence each. Raises `CheckpointRefused` for a name in
    `include` that is no file, and for an index that names files which the directory lacks; `OSError`."""
    paths = {file.path for file in source.files}
    notes = []
    if source.left_out:
        notes.append(f"left out, as it belongs to a download: {_some(source.left_out)}")
    if source.empty_folders:
        notes.append(f"empty folders are left out: {_some(source.empty_folders)}")
    for pattern in unmatched(paths, include):
        if not WILDCARDS & set(pattern):
            raise CheckpointRefused(
                f"{source.root}: there is no file {pattern!r} to publish"
                f"{nearest(pattern, [*paths, *source.not_included])}"
            )
        notes.append(f"no file matches --include {pattern!r}")
    for pattern in unmatched([*source.excluded, *source.left_out], exclude):
        notes.append(f"no file matches --exclude {pattern!r}")
    looked_into = [file for file in source.files if SUSPECTED.search(file.path)][:MOST_LOOKED_INTO]
    found = [note for file in looked_into for note in _look_into(source, file, paths)]
    notes += found[:MOST_NOTES]
    if len(found) > MOST_NOTES:
        notes.append(f"{len(found) - MOST_NOTES:,} more files are not what they are called")
    return notes


def _look_into(source: SourceDirectory, file: SourceFile, paths: set[str]) -> Iterator[str]:
    try:
        if file.path.endswith(INDEXES):
            yield from _check_index(source, file, paths)
        elif file.path.endswith(SUFFIX):
            header = _check_tensors(source.root / file.path, file.size)
            if header:
                yield f"{file.path}: {header}"
        elif file.size < POINTER_BYTES or file.path.endswith(".json"):
            _check_head(source.root / file.path, file.size)
    except BrokenFile as error:
        yield f"{file.path} is not what it is called, and is published as it is: {error}"


def _check_head(place: Path, size: int) -> None:
    """Raises `BrokenFile` for what is known to be something else."""
    if cause := likely_cause(_read(place, HEAD_BYTES), size):
        raise BrokenFile(cause)


def _check_tensors(place: Path, size: int) -> str:
    """What is wrong with some tensors; nothing for most. Raises `BrokenFile`."""
    end = header_end(_read(place, HEAD_BYTES), size)
    if end > MAX_HEADER_READ:
        return ""
    bad = read_header(_read(place, end), size).bad
    listed = [f"{name!r} ({why})" for name, why in list(bad.items())[:NAMED]]
    return f"{len(bad):,} tensors cannot be read from it: {', '.join(listed)}" if bad else ""


def _check_index(source: SourceDirectory, file: SourceFile, paths: set[str]) -> Iterator[str]:
    """Raises `CheckpointRefused` for files that the directory lacks, and `BrokenFile`."""
    if file.size > MAX_INDEX_BYTES:
        raise BrokenFile(f"an index of {file.size:,} bytes; at most {MAX_INDEX_BYTES:,} are read")
    weight_map = read_weight_map(_read(source.root / file.path, file.size))
    folder = file.path.rpartition("/")[0]
    named = {path_in_index(folder, each) for each in set(weight_map.values())}
    missing = sorted(named - paths)
    absent = sorted(named - paths - {*source.excluded, *source.not_included})
    if absent:
        raise CheckpointRefused(
            f"{source.root}: {file.path} names {_some(absent)}, and there is no such file{_why(source, absent[0])}; "
            f"complete the directory, or leave out the index (--exclude {file.path!r})"
        )
    if missing:
        yield f"{file.path} names {_some(missing)}, which --include and --exclude leave out"


def _why(source: SourceDirectory, absent: str) -> str:
    """Why a file may be missing."""
    paths = [file.path for file in source.files]
    around = [*source.left_out, *source.excluded, *source.not_included, *paths]
    if any(path.startswith(f"{absent}.") and path.endswith(UNFINISHED) for path in around):
        return " (its download is not finished)"
    if any((source.root / HUB_DOWNLOADS).glob("**/*.incomplete")):
        return f" (a download is not finished, by {HUB_DOWNLOADS})"
    return " (perhaps the download or copy was not finished, or chose other files)"


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - NAMED
    return ", ".join(paths[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _read(place: Path, count: int) -> bytes:
    with open(place, "rb") as file:
        found: bytes = os.pread(file.fileno(), count, 0)
    return found
