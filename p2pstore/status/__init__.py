"""Status of a peer for people and programs: problems, page, metrics. Read-only; the page is public."""
