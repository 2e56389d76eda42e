"""Checkpoints at a peer: versions are published and fetched, and the peer takes part in their swarms."""
