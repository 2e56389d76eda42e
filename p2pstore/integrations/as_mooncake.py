"""`python -m p2pstore.integrations.as_mooncake PROGRAM ARGUMENTS`, or `-m MODULE ARGUMENTS`: run a program for which
`mooncake.store` is `p2pstore.integrations.mooncake`, and so it is in the Python processes that it starts."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Final

STARTUP: Final = Path(__file__).with_name("startup")
"""Has a `sitecustomize`, which Python imports at its start when this folder is on its path."""


def main() -> None:
    """Install the stand-in here and for children, and run the program. Status 2 when none is named."""
    arguments = sys.argv[1:]
    module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + module:
        sys.exit(
            "usage: python -m p2pstore.integrations.as_mooncake [-m MODULE | PROGRAM] ARGUMENTS..."
        )
    _tell_children()
    from p2pstore.integrations.mooncake.standing_in import install

    install()
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    program = _program(sys.argv[0])
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def _tell_children() -> None:
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if str(STARTUP) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *paths])


def _program(name: str) -> str:
    """A file as it is; else a Python script of that name on the search path, such as `vllm`."""
    if os.path.exists(name):
        return name
    return shutil.which(name) or name


if __name__ == "__main__":
    main()
