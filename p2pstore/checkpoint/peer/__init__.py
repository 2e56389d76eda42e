"""What a peer does with checkpoints: it publishes and fetches versions, and takes part in their swarms."""
