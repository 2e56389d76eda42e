"""Answers to the clients of the peer's host."""
