"""Reads over RDMA. One module imports pyverbs."""
