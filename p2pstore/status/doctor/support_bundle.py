"""Collects diagnostics for support, without secrets, in one file. Shell.

Every part has a deadline of its own, and one that cannot be had is left out with the reason: a bundle is wanted most
when things do not work.

Cluster keys, invites, identities and tickets are removed from its text: known secrets in every form that text gives
them, and text that only looks like a secret as well, since a hash too many is better than a key too few.
"""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any, Final

import p2pstore
from p2pstore import blocking
from p2pstore.errors import P2PStoreError
from p2pstore.objects import MIB
from p2pstore.state.folder import open_regular_file
from p2pstore.status.doctor.checks import in_time

ANSWER_SECONDS: Final = 5.0
DOCTOR_SECONDS: Final = 120.0
PART_SECONDS: Final = 20.0
MAX_LOG_BYTES: Final = 4 * MIB
"""Of each log, its end."""
MAX_SECRET_FILE_BYTES: Final = 64 * 1024
MIN_WORD_LETTERS: Final = 32
"""Of what is secret in these files; the rest are headers and comments."""
MAX_PEERS: Final = 16
INVITE_VARIABLE: Final = "MOONCAKE_P2P_INVITE"
SECRET_FILES: Final = ("identity.key", "cluster.key", "invite")
"""In a state directory."""
OWN_FILES: Final = ("slow", "settings")
"""Parts of a peer's statistics."""

CONTENTS: Final = """\
What `mooncake-p2p support-bundle` gathered on {host}, {when}.

versions.json     p2pstore, Python, libraries, kernel, and the names of the MOONCAKE_P2P_* variables that are set
doctor.json       what `mooncake-p2p doctor` found
peers/NAME/       of each peer of this machine: statistics.json, members.json (the cluster as it sees it), slow.json
                  (recent slow operations), settings.json, and the end of its log
problems.json     what could not be had, and why

Cluster keys, identities, invites, tickets, and all that looks like a secret, were removed. Names of peers, addresses,
paths and names of objects (in slow.json and logs) were not: look before you pass it on.
"""


@dataclass(slots=True)
class Bundle:
    """Collected text by name, and reasons of missing parts."""

    parts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def gather(self, name: str, read: Callable[[], str], seconds: float = PART_SECONDS) -> None:
        """Have a part read, in a thread that is left behind when it hangs."""

        def run() -> tuple[dict[str, str], str]:
            try:
                return self.parts, read()
            except (OSError, P2PStoreError, ValueError) as error:
                return self.problems, str(error) or type(error).__name__

        hangs = self.problems, f"nothing within {seconds:g} s"
        where, text = next(iter(in_time(f"support: {name}", run, seconds)), hangs)
        where[name] = text

    def write(self, file: IO[bytes], folder: str, redactor: Redactor) -> None:
        """As a gzipped tar archive, without secrets."""
        parts = {**self.parts, "problems.json": to_json(self.problems)}
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in sorted(parts.items()):
                data = redactor.clean(text).encode(errors="replace")
                entry = tarfile.TarInfo(f"{folder}/{redactor.clean(name)}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))


def gather(
    sockets: Sequence[Path], logs: Sequence[Path], examine: Callable[[], str]
) -> tuple[Bundle, Redactor]:
    """All parts, and what removes secrets from them. `sockets`: the peers to ask; `logs`: log files to take besides
    those that these name; `examine`: what the doctor says."""
    bundle = Bundle()
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    bundle.parts["README.txt"] = CONTENTS.format(host=platform.node(), when=when)
    bundle.gather("versions.json", versions)
    secrets = [os.environ.get(INVITE_VARIABLE, "").encode()]
    for path in sockets[:MAX_PEERS]:
        secrets += _gather_peer(bundle, path)
    for number, log in enumerate(logs):
        bundle.gather(f"logs/{number}-{log.name}", lambda log=log: read_end(log))  # type: ignore[misc]  # bound now
    bundle.gather("doctor.json", examine, DOCTOR_SECONDS)
    return bundle, Redactor(secrets)


def _gather_peer(bundle: Bundle, path: Path) -> list[bytes]:
    """Collect one peer's own statements. Returns the secrets that it is known to have."""
    folder = f"peers/{path.stem}"
    answered: dict[str, Any] = {}

    def ask() -> str:
        with blocking.connect(path, timeout=ANSWER_SECONDS) as client:
            document = client.statistics()
            members = [asdict(member) for member in client.peers(everyone=True)]
        answered.update(document, members=members)
        return to_json(_without_keys(document))

    bundle.gather(f"{folder}/statistics.json", ask)
    if not answered:
        return []
    peer = answered["peer"]
    bundle.parts[f"{folder}/members.json"] = to_json(answered["members"])
    bundle.parts[f"{folder}/slow.json"] = to_json(peer.get("slow", {}))
    settings = peer.get("settings", {})
    bundle.parts[f"{folder}/settings.json"] = to_json(settings)
    log = log_of(settings)
    if log is None:
        bundle.problems[f"{folder}/log"] = (
            "it logs to standard error: see `journalctl -u`, or the container's log"
        )
    else:
        bundle.gather(f"{folder}/{log.name}", lambda: read_end(log))
    return list(secrets_of(settings))


def _without_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Statistics without the names of objects, and without what has a file of its own."""
    peer = {name: part for name, part in document["peer"].items() if name not in OWN_FILES}
    peer["hottest"] = [
        {name: part for name, part in each.items() if name != "key"} for each in peer.get("hottest", [])
    ]
    return {**document, "peer": peer}


def log_of(settings: dict[str, Any]) -> Path | None:
    """Where a peer with these settings logs, if that is a file."""
    named = settings.get("log_file")
    if named:
        return Path(named)
    state = settings.get("state_dir")
    detached = Path(state) / "peer.log" if state else None
    return detached if detached is not None and detached.exists() else None


def secrets_of(settings: dict[str, Any]) -> Iterator[bytes]:
    """The secrets in the files of a peer with these settings, as far as this user may read them."""
    state = settings.get("state_dir")
    paths = [Path(state) / name for name in SECRET_FILES] if state else []
    if settings.get("cluster_key_file"):
        paths.append(Path(settings["cluster_key_file"]))
    for path in paths:
        with suppress(OSError, P2PStoreError):
            with open_regular_file(path) as file:
                text = file.read(MAX_SECRET_FILE_BYTES).decode(errors="replace")
            for word in text.split():
                if len(word) >= MIN_WORD_LETTERS:
                    yield word.encode()
                with suppress(ValueError):
                    yield bytes.fromhex(word)


def read_end(path: Path) -> str:
    """The end of a file, from the beginning of a line on."""
    with open_regular_file(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES)
        file.seek(start)
        if start:
            file.readline()
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


def versions() -> str:
    """Versions of this installation."""
    return to_json(
        {
            "p2pstore": p2pstore.__version__,
            "python": sys.version,
            "executable": sys.executable,
            "system": platform.platform(),
            "os_release": platform.freedesktop_os_release(),
            "libraries": dict(sorted((each.name, each.version) for each in distributions())),
            "variables": sorted(name for name in os.environ if name.startswith("MOONCAKE_P2P_")),
        }
    )


def to_json(document: Any) -> str:
    """For people and programs."""
    return json.dumps(document, indent=1, default=str) + "\n"


REMOVED: Final = "(removed)"
MIN_SECRET_BYTES: Final = 16
"""Shorter ones would be found in any text."""

_INVITE: Final = re.compile(r"p2pstore1:[A-Za-z0-9_=-]{8,}")
_KEY: Final = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{64}(?![0-9A-Fa-f])")
"""Cluster keys and seeds of identities; hashes of 32 bytes look the same."""
_NAMED: Final = re.compile(
    r"(?i)(\b\w*(?:secret|password|passwd|token|api_?key)\w*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;}]+)"
)
_DENSE: Final = re.compile(r"(?<![A-Za-z0-9_+-])[A-Za-z0-9_+-]{40,}={0,2}")
"""May be a secret in base64."""
_PEER_ID: Final = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


class Redactor:
    """Removes what is known to be secret, and what looks like it."""

    def __init__(self, secrets: Iterable[bytes] = ()) -> None:
        """`secrets` are raw bytes: of a key those that its hexadecimal digits stand for, of a text its own."""
        forms = {form for secret in secrets for form in _forms(secret)}
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        self._known = re.compile("|".join(map(re.escape, longest_first)), re.I) if forms else None

    def clean(self, text: str) -> str:
        """The text without them."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        text = _INVITE.sub("p2pstore1:" + REMOVED, text)
        text = _KEY.sub(REMOVED, text)
        text = _NAMED.sub(_without_value, text)
        return _DENSE.sub(_unless_harmless, text)


def _forms(secret: bytes) -> list[str]:
    """How text may have it."""
    if len(secret) < MIN_SECRET_BYTES:
        return []
    forms = [secret.hex(), repr(secret)[2:-1]]
    for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
        forms.append(encode(secret).decode().rstrip("="))
    with suppress(UnicodeDecodeError):
        forms.append(secret.decode())
    return forms


def _without_value(match: re.Match[str]) -> str:
    """The name alone. JSON stays JSON: a value of a quoted name is quoted."""
    quote = match[2][0] if match[2][0] in "\"'" else '"' if '"' in match[1] else ""
    return f"{match[1]}{quote}{REMOVED}{quote}"


def _unless_harmless(match: re.Match[str]) -> str:
    """Peer ids are public; a word without small letters, capitals or digits is a name."""
    word = match[0]
    if _PEER_ID.fullmatch(word):
        return word
    dense = all(re.search(letters, word) for letters in ("[a-z]", "[A-Z]", "[0-9]"))
    return REMOVED if dense else word
