"""Checks of `mooncake-p2p doctor`: this machine, the peers on it, and the way to another peer."""
