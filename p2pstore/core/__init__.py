"""What a peer decides: put, get, evict, replicate, lease. Pure; the simulator runs it whole."""
