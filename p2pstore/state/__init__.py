"""Files that a peer keeps: its state directory, floors, and where they lie."""
