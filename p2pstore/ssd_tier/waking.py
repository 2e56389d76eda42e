"""Something happened that others wait for."""

from __future__ import annotations

import trio


class Signal:
    """Wakes all who wait. What was sent while nobody waited is remembered for one `wait`."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def send(self) -> None:
        """Something happened."""
        self._event.set()

    async def wait(self) -> None:
        """Returns when something happened since the last `wait` returned. For one task."""
        await self._event.wait()
        self._event = trio.Event()


class Condition:
    """Wakes all who wait now; they look themselves whether what they need is there."""

    def __init__(self) -> None:
        self._lot = trio.lowlevel.ParkingLot()

    def changed(self) -> None:
        """Something changed."""
        self._lot.unpark_all()

    async def wait(self) -> None:
        """Returns at the next change."""
        await self._lot.park()
