"""`support-bundle` of a peer that works and of one that hangs: its contents, and no secrets."""

import base64
import json
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.cluster.machines import COMMAND, Peer, done, new_machine
from tests.waiting import eventually

SECONDS = 120.0
"""A bundle about a peer that hangs waits for it a few times."""
ENCODED = "a ticket's secret in base64: "
TICKET = bytes(range(7, 250, 5))


def gathered(peer: Peer, path: Path, *options: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The command's output, and the files in the bundle."""
    result = subprocess.run(
        [*COMMAND, "support-bundle", "-o", str(path), "--json", *options],
        env={**peer.machine.environment, "MOONCAKE_P2P_SOCKET": peer.ready["socket"]},
        capture_output=True,
        timeout=SECONDS,
    )
    done(result)
    assert path.stat().st_mode & 0o077 == 0
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            assert member.isfile()
            file = archive.extractfile(member)
            assert file is not None
            _, _, name = member.name.partition("/")
            files[name] = file.read().decode()
    said: dict[str, Any] = json.loads(result.stdout)
    assert sorted([*said["parts"], "problems.json"]) == sorted(files)
    return said, files


def test_a_bundle_has_what_helps_and_no_secrets() -> None:
    with new_machine() as machine:
        key_file, log, state = (machine.folder / name for name in ("key", "log", "state"))
        done(machine.run("keygen", str(key_file)))
        key = key_file.read_text().split()[-1]
        options = ["--cluster-key-file", str(key_file), "--log-file", str(log)]
        peer = machine.join("first", *options, "--state-dir", str(state), "--slow-operation", "0.000001")
        invite = done(peer.run("invite")).stdout.decode().split()[-1]
        assert invite.startswith("p2pstore1:")
        seed = (state / "identity.key").read_text().split()[-1]
        secrets = [key, invite, seed, base64.b64encode(bytes.fromhex(key)).decode().rstrip("=")]
        peer.client.put(f"object {invite}", b"value", overwrite=True)
        peer.client.put("plain", b"value")
        for _ in range(3):
            peer.client.get("plain")
        eventually(lambda: bool(peer.client.statistics()["peer"]["hottest"]))
        with log.open("a") as file:
            file.writelines(f"what {secret} is\n" for secret in secrets)
            file.write(f"{ENCODED}{base64.b64encode(TICKET).decode()}\n")
        other = machine.folder / "other.log"
        other.write_text(f"another log: {key.upper()}\n")
        machine.environment["MOONCAKE_P2P_INVITE"] = invite

        said, files = gathered(peer, machine.folder / "a.tar.gz", "--log", str(other))
        text = "\n".join(f"{name}\n{content}" for name, content in files.items())
        for secret in [*secrets, invite[12:], base64.b64encode(TICKET).decode()]:
            assert secret.lower() not in text.lower()
        assert "another log: (removed)" in files["logs/0-other.log"]
        assert ENCODED in files["peers/first/log"]
        assert said["problems"] == {}
        settings = json.loads(files["peers/first/settings.json"])
        assert settings["state_dir"] == str(state)
        statistics = json.loads(files["peers/first/statistics.json"])
        assert statistics["peer"]["peer_id"] == peer.ready["peer_id"]
        assert statistics["peer"]["problems"] == []
        assert "plain" not in files["peers/first/statistics.json"]
        assert statistics["peer"]["hottest"][0]["bytes"] == 5
        slow = json.loads(files["peers/first/slow.json"])
        assert "plain" in {each["key"] for each in slow["operations"]}
        (member,) = json.loads(files["peers/first/members.json"])
        assert member["name"] == "first"
        assert "started" in files["peers/first/log"]
        assert json.loads(files["doctor.json"])["summary"]["ok"] > 5
        versions = json.loads(files["versions.json"])
        assert versions["libraries"]["trio"]
        assert "MOONCAKE_P2P_INVITE" in versions["variables"]

        peer.process.send_signal(signal.SIGSTOP)
        try:
            said, files = gathered(peer, machine.folder / "b.tar.gz", "--log", str(log))
        finally:
            peer.process.send_signal(signal.SIGCONT)
        assert "hangs" in said["problems"]["peers/first/statistics.json"]
        assert "silent" in files["doctor.json"] or "no answer" in files["doctor.json"]
        assert key not in files["logs/0-log"]
