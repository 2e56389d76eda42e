"""The memory that a peer serves objects from: extents, slots, index, leases, eviction. Pure."""
