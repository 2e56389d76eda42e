"""Requests from other peers, and requests to them."""
