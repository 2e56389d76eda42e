"""`support-bundle`: what somebody who is to help would ask for, in one file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_p2p.options import Json, Socket
from mooncake_p2p.output import print_json, printable, progress, remark
from p2pstore.objects import format_bytes

if TYPE_CHECKING:
    from p2pstore.status.doctor.support_bundle import Bundle


def support_bundle(
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write; by default p2pstore-support-TIME.tar.gz in the current folder.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Another log to take in; may be repeated. Logs to files are found.",
            show_default=False,
        ),
    ] = None,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Gather what somebody who is to help would ask for, in one file, without secrets.

    Statistics, members, recent slow operations, settings and the end of the log of each peer on this
    machine (or of the one named by --socket), what `doctor` finds, and versions. What cannot be had
    is left out, with the reason: it works without any peer, and when one hangs.

    Cluster keys, identities, invites, tickets and whatever looks like a secret are removed. Names of
    peers and objects, addresses and paths are not: look before you pass it on.
    """
    from mooncake_p2p.new_file import NewFile
    from p2pstore.local.socket_paths import check_socket_path
    from p2pstore.status.doctor.support_bundle import gather, sockets_to_ask

    when = time.strftime("%Y%m%d-%H%M%S")
    path = output if output is not None else f"p2pstore-support-{when}.tar.gz"
    named = check_socket_path(socket) if socket is not None else None
    file = NewFile(path)
    try:
        os.fchmod(file.descriptor, 0o600)
        with progress("gathering"):
            bundle, redactor = gather(
                sockets_to_ask(named), [Path(each) for each in log or ()], lambda: _doctor(socket)
            )
        with open(file.descriptor, "wb", closefd=False) as out:
            bundle.write(out, f"p2pstore-support-{when}", redactor)
            length = out.tell()
        file.commit()
    finally:
        file.close()
    _tell(path, bundle, length, as_json=json)


def _doctor(socket: str | None) -> str:
    from p2pstore.status.doctor.checks import examine_machine
    from p2pstore.status.doctor.finding import summary
    from p2pstore.status.doctor.support_bundle import to_json

    found = list(examine_machine(socket=socket))
    return to_json({"findings": [each.document() for each in found], "summary": summary(found)})


def _tell(path: str, bundle: Bundle, length: int, *, as_json: bool) -> None:
    if as_json:
        document = {"file": path, "bytes": length, "parts": sorted(bundle.parts)}
        print_json({**document, "problems": bundle.problems})
        return
    print(path)
    remark(
        f"{len(bundle.parts)} parts, {format_bytes(length)}, without keys, invites and tickets. Names of peers and "
        "objects, addresses and paths are in it: look before you pass it on"
    )
    for name, problem in bundle.problems.items():
        remark(printable(f"left out: {name}: {problem}"))
