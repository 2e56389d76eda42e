"""The status page: what somebody wants to see first who was woken up, then the rest. Read-only, for anybody.

`members`, `problems`, `recent` and `checkpoints` decide what is said; `source` asks the peer, once a second at most
however many look; `page` makes the one file that a browser shows.
"""
