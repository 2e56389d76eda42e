"""The large answers that a peer has on their way, and for how long. Any thread may say that one begins or ends."""

from __future__ import annotations

import threading


class Uploads:
    """`places` is how many there may be before readers that know other holders are refused: more would share the same
    network, and all be done later. Times are monotonic seconds."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._changing = threading.Lock()
        self._ended_seconds = 0.0
        self._began_sum = 0.0
        """Of when those on their way began."""
        self.taken = 0
        """How many are on their way."""

    def begin(self, now: float, *, may_refuse: bool = False) -> bool:
        """A large answer is to be sent from now on; whether it may. Where it is not to be refused, it always may."""
        with self._changing:
            if may_refuse and self.taken >= self._places:
                return False
            self.taken += 1
            self._began_sum += now
            return True

    def end(self, began: float, now: float) -> None:
        """One that began then is there, or has failed."""
        with self._changing:
            self.taken -= 1
            self._began_sum -= began
            self._ended_seconds += now - began

    def seconds(self, now: float) -> float:
        """How long answers were on their way until now, all of them together."""
        with self._changing:
            return self._ended_seconds + self.taken * now - self._began_sum
