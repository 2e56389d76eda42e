"""Removals and flushes, and the floors that forbid what they removed."""
