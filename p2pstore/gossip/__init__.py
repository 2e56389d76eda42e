"""Gossip: members, their offers, and the holders of each key."""
