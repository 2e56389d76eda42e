"""Tests that need an RDMA device: `scripts/rdma_vm .venv/bin/python -m pytest tests/rdma`."""

import os
from pathlib import Path

import pytest

from p2pstore.transfer.rdma.rdma_verbs import device_names

HERE = Path(__file__).parent
REASON = "no RDMA device here: run scripts/rdma_vm .venv/bin/python -m pytest tests/rdma"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no device; in the VM there must be."""
    here = [item for item in items if item.path.is_relative_to(HERE)]
    if here and not device_names() and not os.environ.get("P2PSTORE_RDMA_VM"):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=REASON))
