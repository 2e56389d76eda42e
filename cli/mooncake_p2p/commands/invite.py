"""`invite`: the line to paste on the next machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncake_p2p.exit_errors import CommandFailed
from mooncake_p2p.options import DEFAULT_TIMEOUT, Json, Socket, Timeout, connected
from mooncake_p2p.output import print_json, remark

if TYPE_CHECKING:
    from p2pstore.access.keyring import KeyRing
    from p2pstore.results import PeerInfo

MAX_OTHERS: Final = 3
"""Peers that the invite names beside the local one, so that it works while that one is down."""


def invite(
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Leave the key out; copy the key file yourself.")
    ] = False,
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Print one line to paste on the next machine.

    It holds the cluster's name, addresses of this peer and up to three others, and the cluster key: treat
    it as a secret. The key is read from the key file that the local peer uses. To keep the line out of
    the process list and the shell's history, paste only the part that begins with p2pstore1: into
    `mooncake-p2p join --invite -`.
    """
    with connected(socket, timeout=timeout) as client:
        members = client.peers()
        document = client.statistics()
    from p2pstore.access.invite import Invite, format_invite
    from p2pstore.config import is_loopback, split_address
    from p2pstore.state.state_directory import load_cluster_key_file

    key_file = document["peer"]["cluster_key_file"]
    insecure = document["peer"]["settings"]["insecure"]
    keys = _keys_to_tell(load_cluster_key_file(key_file)) if key_file and not without_key else ()
    bootstrap = addresses_to_offer(members)
    line = format_invite(Invite(document["cluster"]["name"], tuple(bootstrap), tuple(keys)))
    only_here = all(is_loopback(split_address(each, "control")[0]) for each in bootstrap)
    command = ["mooncake-p2p", "join", "--invite", line]
    if key_file and without_key:
        command += ["--cluster-key-file", key_file]
    elif not key_file and insecure:
        command.append("--insecure")
    if json:
        print_json(
            {
                "invite": line,
                "command": shlex.join(command),
                "cluster": document["cluster"]["name"],
                "bootstrap": bootstrap,
                "with_key": bool(keys),
            }
        )
    else:
        print(shlex.join(command))
    for text in _remarks(bool(keys), key_file, only_here, not key_file and not insecure):
        remark(text)


def _keys_to_tell(ring: KeyRing) -> Sequence[bytes]:
    from p2pstore.access.keyring import Role

    if ring.role is not Role.MEMBER:
        raise CommandFailed(
            "the local peer's key file holds no key of members, so an invite cannot carry it: copy the file, and make "
            "an invite --without-key"
        )
    return ring.keys


def _remarks(
    with_key: bool, key_file: str | None, only_here: bool, own_user_only: bool
) -> Sequence[str]:
    said = []
    if with_key:
        said.append("this line is a secret: it holds the cluster key, with which anybody can join")
    elif key_file:
        said.append(f"copy {key_file} to the next machine first")
    if own_user_only:
        said.append("without a cluster key it works for this user only")
    if only_here:
        said.append(
            "it works on this machine only, as its peers listen on loopback; `join --listen` or "
            "`--interface`, with a cluster key, serves others"
        )
    return said


def addresses_to_offer(members: Sequence[PeerInfo]) -> list[str]:
    """Control addresses of the local peer and of a few live others. Raises `CommandFailed` without any."""
    me = [each for each in members if each.me]
    others = [each for each in members if not each.me and each.status == "alive"][:MAX_OTHERS]
    found = [address for each in (*me, *others) for address in each.control[:1]]
    if not found:
        raise CommandFailed("the local peer is not reachable at any address: see its log")
    return list(dict.fromkeys(found))
