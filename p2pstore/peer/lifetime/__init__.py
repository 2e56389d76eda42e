"""A peer as a process: start, join, save, leave; its addresses, keys and logs."""
