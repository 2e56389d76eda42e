"""Clients find in the table of locations what their peer holds on its SSD alone, where they do not see it."""

from __future__ import annotations

from p2pstore.gossip.records import Tier
from p2pstore.objects import Version
from tests.unit.core_harness import Harness
