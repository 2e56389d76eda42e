"""`import mooncake.store` for programs that cannot be edited: this package under Mooncake's names, when asked for.

Nothing of it is there by default, and no top-level `mooncake` is installed. `install()` in a program, or for a program
that is left as it is: `python -m p2pstore.integrations.as_mooncake prog.py ARGUMENTS`, which also reaches the Python
processes that it starts.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Final

from p2pstore.integrations import mooncake
from p2pstore.integrations.mooncake.async_store import MooncakeDistributedStoreAsync

MARK: Final = "p2pstore stands in"
"""The docstring of the modules made here."""
_MODULES: Final = ("mooncake", "mooncake.store", "mooncake.async_store", "mooncake.buffer_pool")


def install() -> None:
    """From now on, in this process, `mooncake.store`, `mooncake.async_store` and `mooncake.buffer_pool` are this
    package. May be called twice.

    Where Mooncake is installed as well, its other modules (such as `mooncake.engine`) stay what they are. Raises
    `ImportError` when its store was imported already: whoever did that would have the wrong one.
    """
    current = sys.modules.get("mooncake.store")
    if current is not None:
        if current.__doc__ == MARK:
            return
        raise ImportError("mooncake.store was imported already: call install() before that")
    package = sys.modules.get("mooncake") or types.ModuleType("mooncake", MARK)
    if not hasattr(package, "__path__"):
        package.__path__ = _others()
    store = types.ModuleType("mooncake.store", MARK)
    for name in mooncake.__all__:
        setattr(store, name, getattr(mooncake, name))
    later = types.ModuleType("mooncake.async_store", MARK)
    later.__dict__["MooncakeDistributedStoreAsync"] = MooncakeDistributedStoreAsync
    pools = types.ModuleType("mooncake.buffer_pool", MARK)
    pools.__dict__.update(
        BufferPool=mooncake.BufferPool, RegisteredBufferPool=mooncake.RegisteredBufferPool
    )
    for name, module in zip(_MODULES, (package, store, later, pools), strict=True):
        module.__spec__ = importlib.machinery.ModuleSpec(
            name, _AlreadyMade(module), is_package=module is package
        )
        if module is package:
            module.__spec__.submodule_search_locations = list(package.__path__)
        sys.modules[name] = module
    package.__dict__.update(store=store, async_store=later, buffer_pool=pools)


def uninstall() -> None:
    """Undo `install`, for tests. What was imported meanwhile stays."""
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
