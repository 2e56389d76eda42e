"""Checkpoints: directories and named tensors that one peer publishes and many fetch from each other.

A publisher signs a **manifest**: files, sizes, hashes of pieces. Its hash is the version. The peers that fetch a
version are a **swarm**: each takes pieces from its neighbours, verifies them and passes them on, so that the publisher
sends little more than one copy to any number of peers.
"""
