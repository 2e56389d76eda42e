"""A directory in parts, for clusters too large for every peer to know every location."""
