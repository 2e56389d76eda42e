"""The local socket between a peer and the clients of its host."""
