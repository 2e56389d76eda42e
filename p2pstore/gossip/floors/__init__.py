"""Cluster records: removals, and the members that have heard of them."""
