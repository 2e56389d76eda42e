"""Moving bytes: memory segments, tickets, transports."""
