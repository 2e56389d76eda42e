"""Followers of a checkpoint as an operator has them: commands and peers as processes, stopped, killed and back."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.checkpoint.client.group_calls import has_version
from p2pstore.errors import FollowersLag
from tests.cluster.machines import Machine, Peer, done, new_machine
from tests.contract.swarm_world import make_files
from tests.forked import COMMAND, start
from tests.waiting import eventually

SECONDS = 90.0


class Follower:
    """A `checkpoint follow` in its own process, which notes by --exec what comes into use."""

    def __init__(self, peer: Peer, directory: Path) -> None:
        self.directory = directory
        self.used = directory.with_name(f"{directory.name}.used")
        self.said = directory.with_name(f"{directory.name}.said")
        options = ["--exec", f"echo $CHECKPOINT_VERSION >> {self.used}", "--timeout", "2"]
        with self.said.open("wb") as said:
            self.process = start(
                [*COMMAND, "checkpoint", "follow", "model", str(directory), *options],
                stderr=said,
                env={**peer.machine.environment, "MOONCAKE_P2P_SOCKET": peer.ready["socket"]},
            )

    @property
    def current(self) -> str:
        link = self.directory / "current"
        return os.readlink(link) if link.is_symlink() else ""

    @property
    def ran_for(self) -> list[str]:
        return self.used.read_text().split() if self.used.exists() else []


@contextlib.contextmanager
def followers(*started: Follower) -> Iterator[None]:
    try:
        yield
        assert all(each.process.poll() is None for each in started), "a follow ended"
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


def publish(peer: Peer, directory: Path, size: int, *options: str) -> str:
    make_files(directory, {"weights": size})
    result = done(peer.run("checkpoint", "publish", "model", str(directory), "--json", *options))
    version = json.loads(result.stdout)["version"]
    assert isinstance(version, str)
    return version


def verified_by(peer: Peer, version: str) -> set[str]:
    """The followers that have the version, as a peer sees it."""
    (info,) = peer.client.checkpoints.status("model")
    return {each.name for each in info.members if each.follows and has_version(each, version)}


def until_verified(peer: Peer, names: set[str], version: str) -> None:
    """These follow, and no others, as a peer sees it, and have the version."""

    def verified() -> bool:
        (info,) = peer.client.checkpoints.status("model")
        following = {each.name for each in info.members if each.follows}
        return following == names == verified_by(peer, version)

    eventually(verified, SECONDS)


def passes_on(peer: Peer, name: str, version: str) -> bool:
    """Whether a member gives a version away, as a peer sees it."""
    (info,) = peer.client.checkpoints.status("model")
    return any(
        (each.name, each.version, each.state) == (name, version[:16], "seeding") for each in info.members
    )


def join_all(machine: Machine) -> list[Peer]:
    first = machine.join("publisher")
    others = [Peer(machine, name, "--bootstrap", first.ready["control"]) for name in ("b", "c")]
    peers = [first, *(each.wait_until_ready() for each in others)]
    eventually(lambda: all(each.alive() == 3 for each in peers))
    return peers


@pytest.mark.slow
def test_no_follower_switches_before_all_are_ready_although_some_are_stopped_or_killed() -> None:
    with new_machine() as machine:
        publisher, b, c = join_all(machine)
        folder = machine.folder
        one, two = Follower(b, folder / "one"), Follower(c, folder / "two")
        with followers(one, two):
            first = publish(publisher, folder / "v1", 300_000, "--wait-followers", "2")
            assert (one.current, two.current) == ("", "")
            update = ("checkpoint", "update", "model", "--timeout", "60")
            updated = done(publisher.run(*update, "--json"))
            assert json.loads(updated.stdout)["using"] == 2
            assert (one.current, two.current) == (first, first)

            # A peer is stopped: no follower switches, and it is named. (At once: a dead peer is not waited for.)
            make_files(folder / "v2", {"weights": 300_001})
            c.process.send_signal(signal.SIGSTOP)
            second = publisher.client.checkpoints.publish("model", folder / "v2").version
            with pytest.raises(FollowersLag, match=r"1 of 2 followers have .* behind: c \("):
                publisher.client.checkpoints.update("model", timeout=5)
            assert (one.current, two.current) == (first, first)
            c.process.send_signal(signal.SIGCONT)
            until_verified(publisher, {"b", "c"}, second)
            too_many = ("checkpoint", "update", "model", "--quorum", "3", "--timeout", "1")
            late_by_one = publisher.run(*too_many)
            assert late_by_one.returncode == 5
            assert b"waiting for followers of model, for 1 s at most: 2 of 3" in late_by_one.stderr
            assert b"error: checkpoint 'model': 2 of 3 followers have" in late_by_one.stderr
            assert (one.current, two.current) == (first, first)
            done(publisher.run(*update))
            eventually(lambda: one.current == two.current == second, SECONDS)

            late = (*("checkpoint", "publish", "model"), str(folder / "v2"))
            late_result = publisher.run(*late, "--wait-followers", "3", "--timeout", "1")
            assert late_result.returncode == 5
            said = late_result.stderr.decode().splitlines()[-1]
            assert "2 of 3 followers have" in said

            # A peer is killed when it has the next version and does not use it yet. Its follow waits for it.
            third = publish(publisher, folder / "v3", 300_002)
            until_verified(publisher, {"b", "c"}, third)
            c.stop(signal.SIGKILL)
            assert two.current == second
            machine.join("c", "--bootstrap", publisher.ready["control"])
            until_verified(publisher, {"b", "c"}, third)
            eventually(lambda: passes_on(publisher, "c", third), SECONDS)  # what it had, again
            done(publisher.run(*update))
            eventually(lambda: one.current == two.current == third, SECONDS)
            eventually(lambda: one.ran_for == two.ran_for == [first, second, third], SECONDS)
            assert "trying again until the peer is back" in two.said.read_text()
