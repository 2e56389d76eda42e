"""The file `state.json` of the state directory: incarnation, hybrid clock, and how far floors were seen. Shell.

Every write replaces the whole file. A field that is damaged or implausible costs itself only.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import msgspec
import xxhash

from p2pstore.gossip.floors.floor_stamps import Stamps, stamps_as_text, stamps_from_text
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.members.membership import MAX_AHEAD_MS
from p2pstore.objects import newest_accepted_clock
from p2pstore.state.folder import FORMAT, StateFiles, damaged

_PLAUSIBLE_UNIX_SECONDS: Final = 1_700_000_000.0
"""An earlier clock was not set yet: it does not judge records written by a right one."""
_MAX_CLOCK: Final = (1 << 63) - 1
"""Of a reading that was kept: far in the future, with room for all that follow in the 64 bits of the format."""


class _State(msgspec.Struct):
    format: int
    incarnation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INCARNATION)]
    clock: Annotated[int, msgspec.Meta(ge=0, le=_MAX_CLOCK)]
    floors_seen: dict[str, int] = {}
    floors_horizon: dict[str, int] = {}
    memory: str = ""
    floors_bytes: int = -1
    """Of `floors.bin`, that were on the disk when this was written; -1: an earlier version wrote this."""
    sum: str = ""
    """Of the other fields; empty: an earlier version wrote this."""


class StateRecord:
    """The open `state.json`."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._state = self._load_state()

    @property
    def clock(self) -> int:
        """The hybrid clock's last saved reading."""
        return self._state.clock

    def next_incarnation(self, now_unix_ms: int, segment_id: bytes = b"") -> int:
        """An incarnation above all earlier ones, saved before it is returned, with the id of its memory segment."""
        incarnation = max(self._state.incarnation + 1, now_unix_ms)
        self._write_state(
            msgspec.structs.replace(self._state, incarnation=incarnation, memory=segment_id.hex())
        )
        return self._state.incarnation

    @property
    def last_segment_id(self) -> bytes:
        """Segment id of the last incarnation; empty when unknown."""
        try:
            return bytes.fromhex(self._state.memory)
        except ValueError:
            return b""

    def save_incarnation(self, incarnation: int) -> None:
        """Keep an incarnation that was raised while running, to refute a suspicion."""
        if incarnation > self._state.incarnation:
            self._write_state(msgspec.structs.replace(self._state, incarnation=incarnation))

    @property
    def floors_seen(self) -> Stamps:
        """Up to where floors had been seen when this was last saved."""
        return stamps_from_text(self._state.floors_seen)

    @property
    def floors_horizon(self) -> Stamps:
        """Up to where floors were dropped when this was last saved."""
        return stamps_from_text(self._state.floors_horizon)

    @property
    def promised_floors_bytes(self) -> int:
        """Bytes of `floors.bin` that were on the disk when this was last saved; -1 when unknown."""
        return self._state.floors_bytes

    def save_clock(
        self, clock: int, floors_seen: Stamps | None, floors_horizon: Stamps | None, floors_bytes: int
    ) -> None:
        """Save the hybrid clock's reading, and up to where floors were seen and dropped (None: as before).

        `floors_bytes` of `floors.bin` are on the disk.
        """
        changed = msgspec.structs.replace(self._state, clock=min(clock, _MAX_CLOCK))
        if floors_seen is not None:
            changed.floors_seen = stamps_as_text(floors_seen)
        if floors_horizon is not None:
            changed.floors_horizon = stamps_as_text(floors_horizon)
        changed.floors_bytes = floors_bytes
        if changed != self._state:
            self._write_state(changed)

    def floors_lost(self) -> None:
        """Save that this peer has seen no floors: some of its own are gone."""
        self._write_state(msgspec.structs.replace(self._state, floors_seen={}, floors_bytes=0))

    def floors_shrink(self, floors_bytes: int) -> None:
        """Promise nothing of `floors.bin` before it shrinks to `floors_bytes`: a crash after that would look like
        damage."""
        if self._state.floors_bytes > floors_bytes:
            self._write_state(msgspec.structs.replace(self._state, floors_bytes=0))

    def _load_state(self) -> _State:
        path = self._files.path / "state.json"
        found = self._files.load_json("state.json", dict)
        if found is None:
            return _State(FORMAT, 0, 0)
        told = found.pop("sum", "")
        certain = told == _sum_of(found)
        if (told or "floors_bytes" in found) and not certain:
            self._files.note("state.json was changed or damaged: its stamps of floors are not believed")
            found |= {"floors_seen": {}, "floors_horizon": {}, "floors_bytes": -1}
        now = time.time()
        now_ms = int(now * 1000)
        if not _is_stamp(found.get("incarnation"), MAX_INCARNATION - 1):
            self._files.note("state.json has no usable incarnation: the clock gives a new one")
            found["incarnation"] = 0
        elif (
            # An incarnation in use is kept even if the clock was wrong: others know this peer by it.
            not (certain and found["incarnation"] <= MAX_INCARNATION // 2)
            and found["incarnation"] > now_ms + MAX_AHEAD_MS
            and now > _PLAUSIBLE_UNIX_SECONDS
        ):
            self._files.note(
                "state.json has an incarnation of the far future: the clock gives a new one"
            )
            found["incarnation"] = 0
        if not _is_stamp(found.get("clock"), _MAX_CLOCK):
            self._files.note(
                "state.json has no usable clock: the newest stamp of seen floors takes its place"
            )
            seen = found.get("floors_seen")
            stamps = seen.values() if isinstance(seen, dict) else ()
            found["clock"] = max((s for s in stamps if _is_stamp(s, _MAX_CLOCK)), default=0)
        limit = newest_accepted_clock(now) if now > _PLAUSIBLE_UNIX_SECONDS else _MAX_CLOCK
        for name in ("floors_seen", "floors_horizon"):
            # A clock was fast: a peer that has seen all floors up to a stamp has seen all before it.
            lower = certain and name == "floors_seen"
            found[name] = self._plausible_stamps(name, found.get(name, {}), limit, lower=lower)
        if not isinstance(found.get("memory", ""), str):
            found["memory"] = ""
        if not _is_stamp(found.get("floors_bytes", 0), _MAX_CLOCK):
            found["floors_bytes"] = -1
        try:
            return msgspec.convert(found, _State)
        except msgspec.ValidationError as error:
            raise damaged(path, error) from None

    def _plausible_stamps(self, name: str, stamps: object, limit: int, *, lower: bool) -> dict[str, int]:
        """A table without stamps above the limit, which no correct clock can have written, or with these lowered. A
        writer without a stamp counts as 0, which claims less."""
        try:
            known = stamps_from_text(msgspec.convert(stamps, dict[str, int]))
        except (ValueError, msgspec.ValidationError):
            self._files.note(f"state.json has no usable {name}: it counts as empty")
            return {}
        kept = {member: stamp for member, stamp in known.items() if stamp <= limit}
        if len(kept) < len(known):
            self._files.note(
                f"state.json has {name} of the future: {len(known) - len(kept)} of {len(known)} are not believed. Was "
                "this machine's clock wrong?"
            )
        if lower:
            kept = {member: min(stamp, limit) for member, stamp in known.items()}
        return stamps_as_text(kept)

    def _write_state(self, state: _State) -> None:
        state.sum = _sum_of(msgspec.to_builtins(state))
        self._files.replace("state.json", msgspec.json.encode(state) + b"\n")
        self._state = state


def _is_stamp(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _sum_of(state: dict[str, Any]) -> str:
    fields = {name: value for name, value in state.items() if name != "sum"}
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(fields, order="deterministic"))
