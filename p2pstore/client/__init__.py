"""Clients of a local peer. Never imports the peer itself."""
