"""Whole peers in virtual time: a seeded kernel and a faulty network."""
