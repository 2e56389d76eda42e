"""`doctor` and `support-bundle`: faults of this machine or of the way to a peer, and diagnostics in a file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Json,
    Socket,
    Timeout,
    option,
    parse_timeout,
    was_given,
    with_records,
)
from mooncake_p2p.output import CommandFailed, ExitCode, print_json, printable, progress, remark
from p2pstore.objects import format_bytes

if TYPE_CHECKING:
    from p2pstore.status.doctor.finding import Finding
    from p2pstore.status.doctor.support_bundle import Bundle
    from p2pstore.status.doctor.way import Way

STATUS_COLUMNS: Final = 8
NAME_COLUMNS: Final = 20
PIPE_COLUMNS: Final = 80
MAX_COLUMNS: Final = 120
MAX_MEASURE_SECONDS: Final = 60.0
COLOURS: Final = {"ok": "32", "warning": "33", "broken": "31", "skipped": "2"}


@dataclass(frozen=True, slots=True)
class WayOptions:
    """The options of `doctor --peer`."""

    peer: Annotated[
        str | None, option("HOST:PORT", "Examine the way to the peer with this control address instead.")
    ] = None
    cluster_key_file: Annotated[
        str | None,
        option("FILE", "The cluster's key, for --peer.", envvar="MOONCAKE_P2P_CLUSTER_KEY_FILE"),
    ] = None
    cluster: Annotated[
        str, option("NAME", "The cluster's name, for --peer.", envvar="MOONCAKE_P2P_CLUSTER")
    ] = "default"
    seconds: Annotated[str, option("SECONDS", "How long --peer measures GB/s.")] = "2"

    def way(self, timeout_seconds: float) -> Way | None:
        """The way to examine; None without --peer. Raises `ValueError` for options that contradict each other."""
        measure_seconds = parse_timeout(self.seconds, "--seconds")
        if measure_seconds > MAX_MEASURE_SECONDS:
            raise ValueError(f"--seconds: {self.seconds!r} is above {MAX_MEASURE_SECONDS:g}")
        for each in ("cluster_key_file", "cluster", "seconds"):
            if self.peer is None and was_given(each):
                name = each.replace("_", "-")
                raise ValueError(f"--{name} is for --peer: add it, or leave it out")
        if self.peer is None:
            return None
        from p2pstore.state.folder import load_cluster_key_file
        from p2pstore.state.places import ring_of_the_keyless
        from p2pstore.status.doctor.way import Way

        file = self.cluster_key_file
        ring = load_cluster_key_file(file) if file else ring_of_the_keyless()
        return Way(self.peer, ring, self.cluster, measure_seconds, timeout_seconds)


@with_records
def doctor(
    directory: Annotated[
        str | None, option("DIR", "Try a disk: write 64 MiB there, read it back, remove it.")
    ] = None,
    rdma_topology: Annotated[
        str | None,
        option(
            "FILE|JSON",
            "RDMA devices near each memory, as given to join; shown as a peer will use it.",
            envvar="MOONCAKE_P2P_RDMA_TOPOLOGY",
        ),
    ] = None,
    *,
    options: WayOptions,
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Check this machine, or the way to a peer, and say cause and cure.

    Without --peer: software, clock, memory and limits, sockets and directories, the peers that run
    here, ports, kernel settings, network interfaces, RDMA devices and which memory they are near,
    GPUs, and how fast memory is.
    Nothing needs root; what cannot be read is skipped, with the reason.

    With --peer, no peer need run here: name resolution, TCP, path MTU, encryption, admission with
    the cluster's key, versions, round trips, clock skew, and GB/s by each transport, both ways. It
    does not join the cluster. --timeout is for each step.
    """
    way = options.way(parse_timeout(timeout))
    if way is not None and directory is not None:
        raise ValueError("--directory is about this machine and --peer is not: choose one")
    if directory is not None and not os.path.isdir(directory):
        raise ValueError(f"--directory: {directory} is no directory; name one on the disk to try")
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not json:
            _show(finding)
            sys.stdout.flush()

    if way is not None:
        from p2pstore.status.doctor.way import examine_way

        examine_way(way, report)
    else:
        from p2pstore.status.doctor.checks import examine_machine

        for each in examine_machine(socket=socket, directory=directory, rdma_topology=rdma_topology):
            report(each)
    _conclude(findings, json)


def _conclude(findings: list[Finding], json: bool) -> None:
    """Print the summary, and raise what gives the exit status when something is broken."""
    from p2pstore.status.doctor.finding import Failure, summary, worst_failure

    counted = summary(findings)
    failure = worst_failure(findings)
    if json:
        documents = [finding.document() for finding in findings]
        print_json({"findings": documents, "summary": counted, "fine": not failure})
    else:
        told = [f"{count} {status}" for status, count in counted.items() if count]
        remark(", ".join(told))
    if failure:
        code = {Failure.UNREACHABLE: ExitCode.NO_PEER, Failure.DEADLINE: ExitCode.DEADLINE}.get(
            failure, ExitCode.FAILED
        )
        what = next(finding for finding in findings if finding.failure)
        why = what.cause if json else "broken; cause and cure are above"
        raise CommandFailed(printable(f"{what.name}: {why}"), code)


def _show(finding: Finding) -> None:
    """One line for what was found; cause and cure below it, where there are any."""
    on_terminal = sys.stdout.isatty()
    columns = min(MAX_COLUMNS, shutil.get_terminal_size().columns) if on_terminal else PIPE_COLUMNS
    status = f"{finding.status:<{STATUS_COLUMNS}}"
    if on_terminal:
        status = f"\x1b[{COLOURS[finding.status]}m{status}\x1b[0m"
    value = finding.value if finding.status != "skipped" else finding.cause
    _print_wrapped(f"{printable(finding.name):<{NAME_COLUMNS}} ", printable(value), columns, status)
    if finding.status != "skipped":
        for label, text in (("cause: ", finding.cause), ("cure:  ", finding.cure)):
            if text:
                _print_wrapped(label, printable(text), columns, " " * STATUS_COLUMNS)


def _print_wrapped(label: str, text: str, columns: int, before: str) -> None:
    """`text` behind its label, in as many lines as it needs; `before` takes `STATUS_COLUMNS`."""
    room = max(20, columns - STATUS_COLUMNS - len(label))
    first, *others = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    print(f"{before}{label}{first}".rstrip())
    for line in others:
        print(" " * (STATUS_COLUMNS + len(label)) + line)


def support_bundle(
    output: Annotated[
        str | None,
        option(
            "FILE",
            "The file to write; by default p2pstore-support-TIME.tar.gz in the current folder.",
            "-o",
            "--output",
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        option("FILE", "Another log to take in; may be repeated. Logs to files are found."),
    ] = None,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Collect diagnostics for support, without secrets, in one file.

    Statistics, members, recent slow operations, settings and the end of the log of each peer on this
    machine (or of the one named by --socket), what `doctor` finds, and versions. Missing parts
    are listed with the reason: it works without any peer, and when one hangs.

    Cluster keys, identities, invites, tickets and whatever looks like a secret are removed. Names of
    peers and objects, addresses and paths are not: look before you pass it on.
    """
    from mooncake_p2p.files_and_pipes import NewFile
    from p2pstore.local.socket_paths import check_socket_path, live_sockets
    from p2pstore.status.doctor.support_bundle import gather

    when = time.strftime("%Y%m%d-%H%M%S")
    path = output if output is not None else f"p2pstore-support-{when}.tar.gz"
    sockets = [check_socket_path(socket)] if socket is not None else live_sockets()
    file = NewFile(path)
    try:
        os.fchmod(file.descriptor, 0o600)
        with progress("gathering"):
            logs = [Path(each) for each in log or ()]
            bundle, redactor = gather(sockets, logs, lambda: _doctor(socket))
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
