"""The holder's side of data connections: sessions, answers, threads, intake of values."""
