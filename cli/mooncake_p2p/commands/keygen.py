"""`keygen` and `invite`: the cluster's key, its replacement while peers run, and the line for the next machine."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Json,
    Socket,
    Timeout,
    argument,
    connected,
    flag,
    option,
    with_records,
)
from mooncake_p2p.output import CommandFailed, print_json, remark

if TYPE_CHECKING:
    from p2pstore.access.keyring import KeyRing
    from p2pstore.results import PeerInfo

_NEXT_STEP = {
    "add": "copy the file to every peer and send each SIGHUP; when all have it: keygen --promote",
    "promote": "copy the file to every peer and send each SIGHUP; when all have it: keygen --retire",
    "retire": "copy the file to every peer and send each SIGHUP; then the old key is out",
}
MAX_OTHERS: Final = 3
"""Peers that the invite names beside the local one, so that it works while that one is down."""


class KeyRole(StrEnum):
    member = "member"
    reader = "reader"
    writer = "writer"


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """The task of `keygen`: a step of a rotation, or a key for a role."""

    add: Annotated[bool, flag("--add", "Step 1: append a new key that all will accept.")] = False
    promote: Annotated[bool, flag("--promote", "Step 2: the last key comes first: it proves.")] = False
    retire: Annotated[bool, flag("--retire", "Step 3: remove all keys but the first.")] = False
    role: Annotated[
        KeyRole, typer.Option(help="Role of the key; a reader's and a writer's need --from.")
    ] = KeyRole.member
    source: Annotated[
        str | None, option("FILE", "The cluster's key file, for --role reader and writer.", "--from")
    ] = None
    namespace: Annotated[
        list[str] | None,
        option("NAMESPACE", "Where --role writer may write; may be repeated.", "--namespace"),
    ] = None

    def step(self) -> str:
        """The step of a rotation; "" for a new key. Raises `BadParameter` for options that contradict each other."""
        chosen = [step for step in _NEXT_STEP if getattr(self, step)]
        if len(chosen) > 1:
            raise typer.BadParameter("--add, --promote and --retire are steps: take one at a time")
        if (self.role is KeyRole.member) == (self.source is not None):
            raise typer.BadParameter("--role reader or writer and --from belong together")
        if (self.role is KeyRole.writer) != bool(self.namespace):
            raise typer.BadParameter("--role writer and --namespace belong together")
        if chosen and self.source is not None:
            raise typer.BadParameter(
                f"--{chosen[0]} changes the cluster's key file; make the others' files from it anew"
            )
        return chosen[0] if chosen else ""


@with_records
def keygen(
    file: Annotated[str, argument("FILE", "The key file; a new one must not exist yet.")],
    *,
    what: KeyOptions,
    json: Json = False,
) -> None:
    """Make a new cluster key: 32 random bytes in hexadecimal, in a file that only you can read.

    Give the file to every peer of the cluster with `join --cluster-key-file FILE`.

    A peer that joins with a reader's key (`keygen --role reader --from CLUSTER.key FILE`) can read
    everything and change nothing: it offers no memory, the others do not list it, and they take
    nothing of what it says. Every member accepts the key at once, as it is derived from the cluster's.

    With a writer's key (`--role writer --namespace tenant-a --from CLUSTER.key FILE`) it can also put, remove and flush
    in these namespaces: members hold what it puts, and remove for it. It cannot pin, and publishes no checkpoints.

    To take either back, replace the cluster's key, and make the others' keys anew from the new one.

    To replace the key of a running cluster take three steps, and after each one copy the file to
    every machine and send every peer SIGHUP before you take the next:

    1. `keygen --add FILE`: every peer accepts the new key too; none uses it yet.

    2. `keygen --promote FILE`: the new key proves; the old one is still accepted.

    3. `keygen --retire FILE`: the old key is gone. Peers that were admitted with it are disconnected
    within seconds; those with the new one have connected anew.

    At every moment any two peers share a key, so nothing fails meanwhile. Each peer's log says
    which key proves, by the same short id that this command prints. A file that a peer cannot
    read or that is malformed leaves its keys as they were, and its log says so.
    """
    step, source = what.step(), what.source
    ids = _change(Path(file), step) if step else _make(Path(file), source, what.namespace or [])
    if json:
        print_json({"file": file, "keys": ids})
        return
    if not step:
        where = "every machine" if source is None else f"the {what.role}s' machines"
        remark(f"wrote {file}; copy it to {where} and join with --cluster-key-file {file}")
        return
    also = f"; accepted as well: {', '.join(ids[1:])}" if ids[1:] else ""
    remark(f"{file}: key {ids[0]} proves{also}\n{_NEXT_STEP[step]}")


def _make(path: Path, source: str | None, namespaces: Sequence[str]) -> list[str]:
    """A new file with one key, or with the readers' and writers' keys of those in `source`. Returns their ids."""
    from p2pstore.access.keyring import new_cluster_key
    from p2pstore.state.folder import readers_key_file

    try:
        line = new_cluster_key() + "\n" if source is None else readers_key_file(source, namespaces)
    except ValueError as error:
        raise typer.BadParameter(f"--namespace: {error}") from None
    try:
        _write_new(path, line)
    except FileExistsError:
        raise CommandFailed(
            f"{path} exists and was left alone, because a key that is lost cannot be made again; "
            "choose another name, or replace its key step by step, beginning with --add"
        ) from None
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}") from error
    return _ids(line, path)


def _change(path: Path, step: str) -> list[str]:
    """One step of a rotation: the whole file is replaced at once, or left alone."""
    from p2pstore.access import keyring

    source = str(path)
    target = Path(os.path.realpath(path))  # a link to the file stays a link
    temporary = target.with_name(target.name + ".new")
    try:
        text = target.read_text("ascii")
        if step == "add":
            changed = keyring.add_key(text, source, keyring.new_cluster_key())
        elif step == "promote":
            changed = keyring.promote_key(text, source)
        else:
            changed = keyring.retire_keys(text, source)
        _write_new(temporary, changed)
        temporary.replace(target)
    except FileExistsError:
        raise CommandFailed(
            f"{temporary} is left from a step that was interrupted, or another one is under way: "
            "remove it and try again"
        ) from None
    except FileNotFoundError:
        raise CommandFailed(
            f"{path} does not exist; `mooncake-p2p keygen {shlex.quote(str(path))}` makes a new one"
        ) from None
    except UnicodeDecodeError:
        raise CommandFailed(f"{path} is not a cluster key file") from None
    except OSError as error:
        raise CommandFailed(f"cannot change {path}: {error.strerror}") from error
    return _ids(changed, path)


def _write_new(path: Path, text: str) -> None:
    """Make a file for this user only, on the disk when this returns. Raises `OSError`, leaving none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as out:
            os.fchmod(out.fileno(), 0o600)  # whatever the umask
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()  # an empty file would keep the next try from making one
        raise


def _ids(text: str, path: Path) -> list[str]:
    from p2pstore.access.keyring import parse_cluster_keys

    return [key_id.hex() for key_id in parse_cluster_keys(text, str(path)).ids]


def invite(
    without_key: Annotated[
        bool, flag("--without-key", "Leave the key out; copy the key file yourself.")
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
    from p2pstore.addresses import is_loopback, split_address
    from p2pstore.state.folder import load_cluster_key_file

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
        said.append("this line is a secret: it holds the cluster key, which lets a machine join")
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
