"""The peer: the shells around the pure core, put together."""
