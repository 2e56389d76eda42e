"""Runs of tests that take minutes and find hardly more than their short versions, which the suite has."""

import os

import pytest

only_in_long_runs = pytest.mark.skipif(
    not os.environ.get("P2PSTORE_LONG_TESTS"),
    reason="takes minutes: P2PSTORE_LONG_TESTS=1 scripts/test -m slow",
)
