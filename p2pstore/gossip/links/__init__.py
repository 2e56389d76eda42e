"""Connections between peers."""
