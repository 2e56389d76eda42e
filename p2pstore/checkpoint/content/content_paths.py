"""Which names a manifest may give to files and checkpoints. Pure.

What a manifest names is created below a directory of whoever fetches it. So a path is plain: relative, made of
names, going nowhere but down. There are no links in a manifest at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from p2pstore.errors import CheckpointRefused

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
