"""The system has no more descriptors or memory for another connection: what to say, and what to do. Shell."""

from __future__ import annotations

import contextlib
import errno
import resource
from pathlib import Path
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_shortage(error: OSError) -> bool:
    """Whether something is lacking that may be there again."""
    return error.errno in SHORTAGES


def shortage(error: OSError) -> str:
    """What is lacking, how much there may be of it, and what to do, for people."""
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        more = f" (the administrator allows {hard:,})" if hard > soft else ""
        return (
            f"this process has all of the {soft:,} descriptors that it may have{more}: raise `ulimit -n` (LimitNOFILE "
            "of a service, --ulimit nofile of a container), or close some connections"
        )
    if error.errno == errno.ENFILE:
        with contextlib.suppress(OSError, ValueError):
            most = int(Path("/proc/sys/fs/file-max").read_text())
            return (
                f"this machine has all of the {most:,} files open that it may have: raise `sysctl fs.file-max`, or "
                "find out what holds so many (`lsof`)"
            )
    return f"the kernel has no memory for it ({error.strerror}): free some, or raise this process's limit of memory"
