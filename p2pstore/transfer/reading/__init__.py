"""The reader's side of data connections: connections, requests, spans, shared memory."""
