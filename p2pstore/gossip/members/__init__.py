"""Membership, its claims and probes, the active view."""
