"""Reads: where an object is, which holders are named to a client, what a peer serves."""
