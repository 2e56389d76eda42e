"""`import mooncake.store` for programs that cannot be edited: our package under Mooncake's names, when asked for.

`install()` in a program; or `python -m p2pstore.integrations.as_mooncake PROGRAM ARGUMENTS`, or `-m MODULE ARGUMENTS`,
which runs a program that is left as it is, and also reaches the Python processes that it starts. Nothing of it is there
by default.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from p2pstore.integrations import mooncake
from p2pstore.integrations.mooncake import mooncake_config

STARTUP: Final = Path(__file__).with_name("startup")
"""Has a `sitecustomize`, which Python imports at its start when this folder is on its path."""
MARK: Final = "p2pstore stands in"
"""The docstring of the modules made here."""
_POOLS: Final = ("BufferPool", "RegisteredBufferPool")
_MODULES: Final[dict[str, Sequence[str]]] = {
    "mooncake": ("__version__", *_POOLS),
    "mooncake.store": ("__version__", *mooncake.__all__),
    "mooncake.async_store": ("MooncakeDistributedStoreAsync", "MooncakeDistributedStore"),
    "mooncake.buffer_pool": _POOLS,
    "mooncake.mooncake_config": (
        *("MooncakeConfig", "DEFAULT_GLOBAL_SEGMENT_SIZE", "DEFAULT_LOCAL_BUFFER_SIZE"),
    ),
}
"""Each module, and what of this package is in it."""
_PACKAGES: Final = ("mooncake", "mooncake.store")


def install() -> None:
    """From now on, in this process, `mooncake.store` and the others of the table are this package. May be called twice.

    Where Mooncake is installed as well, its other modules (such as `mooncake.engine`) stay what they are. Raises
    `ImportError` when its store was imported already: that module would have the wrong one.
    """
    current = sys.modules.get("mooncake.store")
    if current is not None:
        if current.__doc__ == MARK:
            return
        raise ImportError("mooncake.store was imported already: call install() before that")
    for name, has in _MODULES.items():
        module = sys.modules.get(name) or types.ModuleType(name, MARK)
        if name in _PACKAGES and not hasattr(module, "__path__"):
            module.__path__ = _others() if name == "mooncake" else []
        for each in has:
            source = mooncake_config if each.startswith("DEFAULT_") else mooncake
            setattr(module, each, getattr(source, each))
        module.__spec__ = importlib.machinery.ModuleSpec(
            name, _AlreadyMade(module), is_package=name in _PACKAGES
        )
        if name in _PACKAGES:
            module.__spec__.submodule_search_locations = list(module.__path__)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)


def uninstall() -> None:
    """Undo `install`, for tests. Names imported meanwhile stay."""
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and module.__doc__ == MARK:
            del sys.modules[name]


class _AlreadyMade(importlib.abc.Loader):
    """Gives a module that is there."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _others() -> list[str]:
    """Where Mooncake's own modules are, if it is installed. It is not imported for that."""
    spec = importlib.util.find_spec("mooncake")
    return list(spec.submodule_search_locations or []) if spec is not None else []


def main() -> None:
    """Install the stand-in here and for children, and run the program. Status 2 when none is named."""
    arguments = sys.argv[1:]
    module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + module:
        sys.exit("usage: python -m p2pstore.integrations.as_mooncake [-m MODULE | PROGRAM] ARGUMENTS...")
    _tell_children()
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
