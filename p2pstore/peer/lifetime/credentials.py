"""By what this peer lets others in: cluster key ring and allow list, read from their files and read anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import trio

from p2pstore.access.keyring import AllowList, KeyRing, Role, parse_peer_ids, rights_of
from p2pstore.addresses import is_loopback, join_address
from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.objects import MIB
from p2pstore.state.folder import load_cluster_key_file, open_regular_file
from p2pstore.state.places import user_ring

logger = logging.getLogger("p2pstore.peer")

_MAX_ALLOW_FILE_BYTES: Final = 4 * MIB


class Credentials:
    """Ring and allow list, shared by all admission.

    `on_change` is called after a reload that changed something: to end what would not be admitted any more.
    """

    def __init__(self, config: PeerConfig, own_id: PeerId) -> None:
        """Raises `ConfigError` when a file cannot be read or is malformed."""
        self.ring = KeyRing()
        self.allowed = AllowList()
        self.on_change: Callable[[], None] = lambda: None
        self._key_file = config.cluster_key_file
        self._open = config.insecure and self._key_file is None
        self._allow_file = config.allow_file
        self._own_id = own_id
        self._reloading = trio.Lock()
        self._apply(*self._read())

    def warn_if_open(self) -> None:
        """Warn if nothing keeps strangers out."""
        if self._open:
            logger.warning(
                "--insecure without a cluster key: every user and machine that reaches this peer's ports may read, "
                "write and remove everything",
                extra={"event": "insecure"},
            )

    async def reload(self) -> bool:
        """Read the files again. Whether something changed.

        Raises `ConfigError`, having changed nothing, when a file cannot be read or is malformed, or makes a member of
        a reader or writer, or one of these of a member.
        """
        async with self._reloading:
            ring, allowed = await trio.to_thread.run_sync(self._read)
            if bool(ring.signers) != bool(self.ring.signers):
                raise ConfigError(
                    f"{self._key_file} holds keys of another role now: restart this peer to change its role"
                )
            if (ring.content, allowed) == (self.ring.content, self.allowed.peer_ids):
                logger.info("read again, unchanged: %s", self._describe())
                return False
            self._apply(ring, allowed)
            logger.info("read again: %s", self._describe())
            self.on_change()
            return True

    def _read(self) -> tuple[KeyRing, frozenset[PeerId] | None]:
        own = KeyRing if self._open else user_ring
        ring = load_cluster_key_file(self._key_file) if self._key_file else own()
        allowed = None
        if self._allow_file is not None:
            allowed = frozenset([*_load_allow_file(self._allow_file), self._own_id])
        return ring, allowed

    def _apply(self, ring: KeyRing, allowed: frozenset[PeerId] | None) -> None:
        self.ring.replace(*ring.content)
        self.allowed.replace(allowed)

    def _describe(self) -> str:
        """Ring and list in one line; keys by their ids, which are hashes."""
        if self._open:
            text = "no cluster key: everybody may come in"
        elif not self._key_file:
            text = "no cluster key: only peers of this user on this machine may come in"
        else:
            first, *others = (key_id.hex() for key_id in self.ring.ids)
            text = f"cluster key {first} proves"
            text += f", {', '.join(others)} accepted as well" if others else ""
            if self.ring.role is not Role.MEMBER:
                text += f", of a {rights_of(self.ring)}"
        if self.allowed.peer_ids is not None:
            text += f"; {len(self.allowed.peer_ids)} peers on the allow list, this one included"
        return text


def fitted_to_role(config: PeerConfig) -> PeerConfig:
    """The settings of a peer whose key file may be a reader's or a writer's: such a peer offers no memory, as no
    other peer would be told of its objects. Raises `ConfigError` for an unreadable file, and settings that need
    memory."""
    if not config.cluster_key_file:
        return config
    ring = load_cluster_key_file(config.cluster_key_file)
    if ring.role is Role.MEMBER:
        return config
    logger.info("%s makes this peer a %s: it offers no memory", config.cluster_key_file, rights_of(ring))
    return msgspec.structs.replace(config, memory=0).checked()


def log_expelled(peer_ids: Sequence[PeerId]) -> None:
    """Log the members that are not on the allow list any more."""
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
