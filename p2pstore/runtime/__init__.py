"""Streams, nurseries, turns and budgets that every shell uses."""
