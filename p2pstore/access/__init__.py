"""Admission to a cluster: keys, roles, allow list, invites, and fair shares of a peer's connections."""
