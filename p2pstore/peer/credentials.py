"""By what this peer lets others in: cluster key ring and allow list, read from their files and read anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from p2pstore.allowlist import AllowList, parse_peer_ids
from p2pstore.config import PeerConfig, is_loopback, join_address
from p2pstore.errors import ConfigError
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.keyring import KeyRing
from p2pstore.regular_file import open_regular_file
from p2pstore.statedir import load_cluster_key_file

logger = logging.getLogger("p2pstore.peer")

_MAX_ALLOW_FILE_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files say."""

    keys: Sequence[bytes]
    allowed: frozenset[PeerId] | None


class Credentials:
    """Ring and allow list, shared by all who let somebody in.

    `on_change` is called after a reload that changed something: to end what would not be admitted any more.
    """

    def __init__(self, config: PeerConfig, own_id: PeerId) -> None:
        """Raises `ConfigError` when a file cannot be read or is malformed."""
        self.ring = KeyRing()
        self.allowed = AllowList()
        self.on_change: Callable[[], None] = lambda: None
        self._key_file = config.cluster_key_file
        self._allow_file = config.allow_file
        self._own_id = own_id
        self._reloading = trio.Lock()
        self._apply(self._read())

    async def reload(self) -> bool:
        """Read the files again. Whether something changed.

        Raises `ConfigError`, having changed nothing, when a file cannot be read or is malformed.
        """
        async with self._reloading:
            found = await trio.to_thread.run_sync(self._read)
            if found == self._current():
                logger.info("read again, unchanged: %s", self._describe())
                return False
            self._apply(found)
            logger.info("read again: %s", self._describe())
            self.on_change()
            return True

    def _read(self) -> _Files:
        keys = load_cluster_key_file(self._key_file).keys if self._key_file else KeyRing().keys
        if self._allow_file is None:
            return _Files(keys, None)
        return _Files(keys, frozenset([*_load_allow_file(self._allow_file), self._own_id]))

    def _current(self) -> _Files:
        return _Files(self.ring.keys, self.allowed.peer_ids)

    def _apply(self, found: _Files) -> None:
        self.ring.replace(found.keys)
        self.allowed.replace(found.allowed)

    def _describe(self) -> str:
        """Ring and list in one line; keys by their ids, which are hashes."""
        if self.ring.keyless:
            text = "no cluster key"
        else:
            first, *others = (key_id.hex() for key_id in self.ring.ids)
            text = f"cluster key {first} proves"
            text += f", {', '.join(others)} accepted as well" if others else ""
        if self.allowed.peer_ids is not None:
            text += f"; {len(self.allowed.peer_ids)} peers on the allow list, this one included"
        return text


def log_expelled(peer_ids: Sequence[PeerId]) -> None:
    """Say who is not on the allow list any more."""
    for peer_id in peer_ids:
        logger.warning("%s is not on the allow list any more: expelled", format_peer_id(peer_id))


def refuse_open_door(config: PeerConfig, setting: str, bound: tuple[str, int]) -> None:
    """Raise `ConfigError` when a listener is bound where others reach it, but nothing keeps strangers out.

    `PeerConfig.checked` has judged what was written; this judges what became of it: a name may resolve to
    anything.
    """
    if not is_loopback(bound[0]):
        config.refuse_without_key(f"{setting}: {join_address(*bound)}")


def _load_allow_file(path: str) -> list[PeerId]:
    try:
        with open_regular_file(Path(path)) as file:
            data = file.read(_MAX_ALLOW_FILE_BYTES + 1)
        if len(data) > _MAX_ALLOW_FILE_BYTES:
            raise ConfigError(f"{path} is too long to be a list of peer ids")
        return parse_peer_ids(data.decode(), path)
    except OSError as error:
        raise ConfigError(
            f"the allow file {path} cannot be read: {error.strerror}; it names the peers that may come in, one "
            "peer id a line"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"the allow file {path} is not a text file") from None
