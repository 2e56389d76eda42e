"""What only some environments have."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def require_torch() -> Any:
    """torch. Where it is not installed the test is skipped, unless the run insists on it, as CI does."""
    if os.environ.get("P2PSTORE_REQUIRE_TORCH"):
        return importlib.import_module("torch")
    return pytest.importorskip("torch", reason="torch is not installed (scripts/setup --torch)")
