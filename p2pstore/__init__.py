"""A masterless object store for LLM inference: KV cache and checkpoints, from peer to peer."""
