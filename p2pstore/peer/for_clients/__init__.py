"""What a peer answers to the clients of its host."""
