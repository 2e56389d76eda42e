"""`keygen`: the key that all peers of one cluster share, and replacing it while they run."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mooncake_p2p.exit_errors import CommandFailed
from mooncake_p2p.options import Json
from mooncake_p2p.output import print_json, remark

_NEXT_STEP = {
    "add": "copy the file to every peer and send each SIGHUP; when all have it: keygen --promote",
    "promote": "copy the file to every peer and send each SIGHUP; when all have it: keygen --retire",
    "retire": "copy the file to every peer and send each SIGHUP; then the old key is out",
}


class KeyRole(StrEnum):
    member = "member"
    reader = "reader"
    writer = "writer"


def keygen(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The key file; a new one must not exist yet."),
    ],
    add: Annotated[
        bool, typer.Option("--add", help="Step 1: append a new key that all will accept.")
    ] = False,
    promote: Annotated[
        bool, typer.Option("--promote", help="Step 2: the last key comes first: it proves.")
    ] = False,
    retire: Annotated[
        bool, typer.Option("--retire", help="Step 3: remove all keys but the first.")
    ] = False,
    role: Annotated[
        KeyRole, typer.Option(help="Whom the key is for; a reader's and a writer's need --from.")
    ] = KeyRole.member,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="The cluster's key file, for --role reader and writer.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="NAMESPACE",
            help="Where --role writer may write; may be repeated.",
            show_default=False,
        ),
    ] = None,
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

    3. `keygen --retire FILE`: the old key is gone. Whoever was admitted with it is disconnected
    within seconds; who holds the new one has connected anew.

    At every moment any two peers share a key, so nothing fails meanwhile. Each peer's log says
    which key proves, by the same short id that this command prints. A file that a peer cannot
    read or that is malformed leaves its keys as they were, and its log says so.
    """
    steps = {"add": add, "promote": promote, "retire": retire}
    chosen = [step for step, wanted in steps.items() if wanted]
    if len(chosen) > 1:
        raise typer.BadParameter("--add, --promote and --retire are steps: take one at a time")
    if (role is KeyRole.member) == (source is not None):
        raise typer.BadParameter("--role reader or writer and --from belong together")
    namespaces = namespace or []
    if (role is KeyRole.writer) != bool(namespaces):
        raise typer.BadParameter("--role writer and --namespace belong together")
    if chosen and source is not None:
        raise typer.BadParameter(
            f"--{chosen[0]} changes the cluster's key file; make the others' files from it anew"
        )
    ids = _change(Path(file), chosen[0]) if chosen else _make(Path(file), source, namespaces)
    if json:
        print_json({"file": file, "keys": ids})
        return
    if not chosen:
        where = "every machine" if source is None else f"the {role}s' machines"
        remark(f"wrote {file}; copy it to {where} and join with --cluster-key-file {file}")
        return
    also = f"; accepted as well: {', '.join(ids[1:])}" if ids[1:] else ""
    remark(f"{file}: key {ids[0]} proves{also}\n{_NEXT_STEP[chosen[0]]}")


def _make(path: Path, source: str | None, namespaces: Sequence[str]) -> list[str]:
    """A new file with one key, or with the readers' and writers' keys that go with those in `source`. Returns their
    ids."""
    from p2pstore.access.keyring import new_cluster_key
    from p2pstore.state.state_directory import readers_key_file

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
