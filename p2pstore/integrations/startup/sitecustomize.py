"""Imported by every Python process that `as_mooncake` starts: `mooncake.store` is p2pstore's there, from its first
import on. A `sitecustomize` that this one hides is imported as well."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _OnFirstImport(importlib.abc.MetaPathFinder):
    """Costs nothing until `mooncake` is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "mooncake":
            return None
        sys.meta_path.remove(self)
        from p2pstore.integrations.as_mooncake import install

        install()
        return sys.modules["mooncake"].__spec__


def _import_the_hidden_one() -> None:
    here = Path(__file__).resolve().parent
    places = [each for each in sys.path if Path(each or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _OnFirstImport())
_import_the_hidden_one()
