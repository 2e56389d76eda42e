"""Writes: what a put decides, where its bytes go, and when it is published."""
