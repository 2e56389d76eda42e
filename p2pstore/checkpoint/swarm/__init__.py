"""Which piece comes next from which peer. Pure: effects go out, events come in."""
