"""Checkpoints as a client sees them: publish, fetch, follow."""
