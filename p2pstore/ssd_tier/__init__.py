"""Cold objects on a local disk: a log of segments, an index of what is in it, and who may come in."""
