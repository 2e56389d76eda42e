"""Comparing and exchanging what peers know."""
