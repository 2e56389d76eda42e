"""Objects in a segment, put there without a peer."""

import numpy as np

from p2pstore.memory.entries import ObjectEntry, Written
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import TrailerBody, encode_trailer
from p2pstore.objects import Version, key_digest, root_checksum


def stored(
    segment: Segment,
    trailer: TrailerBody,
    value: bytes | int,
    *,
    clock: int = 1,
    writer: int = 1,
    now: float = 0.0,
    soft: bool = False,
    follows: bytes = b"",
    digest: bytes = b"",
) -> ObjectEntry:
    """An object of this value, or of unwritten bytes of this length. `digest`: another one than that of its key."""
    length = value if isinstance(value, int) else len(value)
    room = len(encode_trailer(trailer))
    made = segment.reserve(length, room, session="test", now=now, namespace=trailer.namespace)
    if isinstance(value, bytes) and value:  # numpy copies beside other threads
        view = segment.reservation_view(made.number, "test")
        np.copyto(np.frombuffer(view, np.uint8)[:length], np.frombuffer(value, np.uint8))
    digest = digest or key_digest(trailer.key, trailer.namespace)
    version = Version(clock, writer, root_checksum(length, trailer.sums))
    written = Written(made.number, digest, version, trailer, length, follows)
    return segment.commit(written, session="test", soft=soft, now=now)
