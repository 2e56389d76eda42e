"""Cluster records: what was removed, and who has heard of it."""
