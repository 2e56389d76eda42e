"""Which network cards are near which memory of this machine."""
