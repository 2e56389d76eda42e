"""Parts that only some environments have."""

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest


def require_torch() -> Any:
    """torch. Where it is not installed the test is skipped, unless the run insists on it, as CI does."""
    if os.environ.get("P2PSTORE_REQUIRE_TORCH"):
        return importlib.import_module("torch")
    return pytest.importorskip("torch", reason="torch is not installed (scripts/setup --torch)")


def require_prometheus(program: str) -> str:
    """The path of `promtool` or `prometheus`. Where there is none the test is skipped, unless the run insists on it, as
    CI does."""
    unpacked = Path(__file__).parents[1] / ".venv" / "prometheus" / "usr" / "bin" / program
    path = str(unpacked) if unpacked.exists() else shutil.which(program)
    if path is None:
        why = f"{program} is not installed (scripts/setup --prometheus)"
        if os.environ.get("P2PSTORE_REQUIRE_PROMETHEUS"):
            raise RuntimeError(why)
        pytest.skip(why)
    return path
