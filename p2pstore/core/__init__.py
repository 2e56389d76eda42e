"""A peer's decisions: put, get, evict, replicate, lease. Pure; the simulator runs it whole."""
