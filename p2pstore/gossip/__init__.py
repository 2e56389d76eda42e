"""Who is alive, what they offer, who holds which key."""
