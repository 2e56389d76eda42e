"""Reads: lookups, the holders named to a client, fetches, serving."""
