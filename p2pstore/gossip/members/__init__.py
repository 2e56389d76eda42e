"""Who is there: membership, its claims and probes, the active view."""
