"""Copies of objects: made on other peers, kept up after deaths, handed over, moved to the SSD and back."""
