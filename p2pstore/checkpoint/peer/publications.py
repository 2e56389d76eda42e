"""What this peer publishes from directories, kept in its state directory: after a restart it is published again. Shell;
blocking, for worker threads.

Kept are the signed manifest, where the directory is found, and the times of its files: who looks at these sees in a
moment whether anything changed, and nothing has to be hashed again. (A piece is verified before it is sent, so a change
that the times do not show costs that piece, and no wrong bytes.)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Final

from p2pstore.checkpoint.content.manifest import SignedManifest, format_version
from p2pstore.checkpoint.content.sources import SourceDirectory
from p2pstore.checkpoint.peer.stores import HeldDirectory
from p2pstore.errors import CheckpointRefused, ProtocolError
from p2pstore.state.state_directory import StateDirectory
from p2pstore.wire import Message, decode_body, encode_body

logger = logging.getLogger("p2pstore.peer")

FORMAT: Final = 1


class Publication(Message, frozen=True):
    """A version that is published from a directory. `directory` is its absolute path, as this process sees it, `shown`
    what its user called it; `times` are the time of the last change (ns) and the inode of each file of the manifest."""

    format: int
    namespace: str
    directory: bytes
    shown: str
    manifest: SignedManifest
    times: list[tuple[int, int]]

    def open(self) -> tuple[SourceDirectory, HeldDirectory]:
        """The directory, as it was; the second one keeps it open. Raises `CheckpointChanged`, `OSError`."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            held = HeldDirectory(descriptor, self.shown)
        finally:
            os.close(descriptor)
        try:
            return SourceDirectory.as_it_was(held.path, self.manifest.manifest, self.times), held
        except BaseException:
            held.close()
            raise


class Publications:
    """Those of one peer. A disk that fails costs a log line."""

    def __init__(self, state: StateDirectory | None) -> None:
        """Without a state directory, nothing is kept."""
        self._state = state
        self._kept: set[bytes] = set()

    def keep(
        self, namespace: str, signed: SignedManifest, source: SourceDirectory, held: HeldDirectory
    ) -> None:
        """Remember a version that is published now."""
        version = signed.version
        place = held.place
        if self._state is None:
            return
        if place is None:
            logger.info(
                "%s is not found under its path: after a restart, %s has to be published again",
                held.shown,
                format_version(version),
            )
            return
        times = [(file.stamp[0], file.stamp[2]) for file in source.files]
        kept = Publication(FORMAT, namespace, os.fsencode(place), held.shown, signed, times)
        try:
            self._state.save_publication(format_version(version), encode_body(kept))
        except OSError as error:
            logger.warning(
                "after a restart, checkpoint %s has to be published again: %s",
                format_version(version),
                error,
            )
            return
        self._kept.add(version)

    def forget(self, version: bytes) -> None:
        """It is published no more."""
        if self._state is None or version not in self._kept:
            return
        self._kept.discard(version)
        try:
            self._state.drop_publication(format_version(version))
        except OSError as error:
            logger.warning("the state directory cannot be written: %s", error)

    def load(self) -> list[Publication]:
        """Those of an earlier life. What cannot be read is left where it is, and said in the log."""
        return list(self._load())

    def _load(self) -> Iterator[Publication]:
        for name, body in [] if self._state is None else self._state.load_publications():
            try:
                kept = decode_body(Publication, body)
                if kept.format != FORMAT:
                    raise ProtocolError(f"format {kept.format}; this version knows {FORMAT}")
                if name != format_version(kept.manifest.version):
                    raise ProtocolError("it is of another version")
                kept.manifest.manifest  # noqa: B018  # read here, in a worker thread
            except (ProtocolError, CheckpointRefused) as error:
                logger.warning(
                    "publication %s in the state directory: %s; it is left alone", name, error
                )
                continue
            self._kept.add(kept.manifest.version)
            yield kept
