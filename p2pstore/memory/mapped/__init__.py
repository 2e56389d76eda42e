"""Mapped memory behind a segment: shared memory, files, NUMA, memory kept across restarts."""
