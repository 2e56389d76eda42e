"""Prometheus metrics of a peer, and the HTTP server that answers them."""
