"""Who may take part, and how much of a peer's places and memory each may take: keys, roles, allow list, strangers."""
