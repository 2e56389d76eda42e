"""Checkpoints: directories and named tensors that one peer publishes and many fetch from each other.

A publisher signs a **manifest** (`manifest`): files, sizes, hashes of pieces. Its hash is the version. Peers that
fetch a version are a **swarm** (`swarm`): each takes pieces from whoever has them, verifies them, and passes them on,
so the publisher sends little more than one copy however many peers there are.
"""
