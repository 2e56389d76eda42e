"""One publish or fetch that somebody waits for: how far it is."""

from __future__ import annotations

from enum import StrEnum

from p2pstore.checkpoint.peer.news import News


class JobPhase(StrEnum):
    """What a job does now."""

    WAITING = "waiting"
    """For the checkpoint to be published."""
    HASHING = "hashing"
    """Of what is published."""
    SEEDING = "seeding"
    """Until the others have everything among them."""
    CHECKING = "checking"
    """What is there already."""
    FETCHING = "fetching"
    FINISHING = "finishing"
    """Everything is here, and is made durable."""
    DONE = "done"


class Job(News):
    """Its progress, for who looks now and then, or waits for the next change."""

    def __init__(self, directory: int = -1) -> None:
        """`directory` is a descriptor that stays open as long as the job lasts; -1 for none."""
        super().__init__()
        self.directory = directory
        self.phase = JobPhase.WAITING
        self.done_bytes = 0
        self.total_bytes = 0
        self.members = 0
        self.version = b""

    def begin(self, phase: JobPhase, total_bytes: int = 0, done_bytes: int = 0) -> None:
        """It does something else now."""
        self.phase, self.total_bytes, self.done_bytes = phase, total_bytes, done_bytes
        self.changed()

    def advance(self, count: int) -> None:
        """So many more bytes are done."""
        self.done_bytes += count
        self.changed()

    def at(self, done_bytes: int, members: int) -> None:
        """So many bytes are done in all, with so many members."""
        if (done_bytes, members) != (self.done_bytes, self.members):
            self.done_bytes, self.members = done_bytes, members
            self.changed()
