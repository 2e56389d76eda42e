"""The state directory: locking, atomic files, torn tails, newer formats, full disks, and what others planted there."""

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.access.invite import Invite
from p2pstore.access.keyring import new_cluster_key
from p2pstore.checkpoint.content.directory_versions import (
    PieceRecord,
    kept_manifest,
    part_of,
    write_part,
)
from p2pstore.errors import ConfigError
from p2pstore.gossip.records import SignedRecord
from p2pstore.integrations.mooncake.tensor_format import read_one, write_one
from p2pstore.objects import Version, clock_from_unix_seconds
from p2pstore.peer.lifetime.leaving import StateSaver
from p2pstore.state.folder import Folder, ephemeral, load_cluster_key_file, replace_file
from p2pstore.state.state_directory import StateDirectory
from tests.unit.core_harness import Harness, digest_of


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def records(count: int) -> list[SignedRecord]:
    return [
        SignedRecord(b"body %d" % number * number, bytes([number + 1]) * 64) for number in range(count)
    ]


def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state"
    with StateDirectory.open(path) as state:
        peer_id = state.identity().peer_id
        incarnation = state.record.next_incarnation(1000)
        state.save_clock(77)
        state.save_addresses(["10.0.0.1:17946", "[::1]:1"])
        assert state.load_publishers() == ([], [])
        state.save_publishers([("space", "name", peer_id), ("", "other", peer_id)])
        pins, forgotten = state.load_publishers()
        assert forgotten == []
        state.save_publishers(pins, [("space", "old", peer_id, 7)])
        for record in records(3):
            state.floors.append([record])
    assert mode(path) == 0o700
    assert mode(path / "identity.key") == 0o600
    with StateDirectory.open(path) as state:
        assert state.identity().peer_id == peer_id
        assert incarnation == 1000
        assert state.record.next_incarnation(500) == 1001, "the wall clock went back"
        assert state.record.next_incarnation(5000) == 5000
        assert state.record.clock == 77
        assert state.load_addresses() == ["10.0.0.1:17946", "[::1]:1"]
        pins, forgotten = state.load_publishers()
        assert pins == [("space", "name", peer_id), ("", "other", peer_id)]
        assert forgotten == [("space", "old", peer_id, 7)]
        assert state.floors.load() == records(3)
        state.floors.replace(records(2))
        assert state.floors.load() == records(2)
        state.record.save_incarnation(9000)
        state.record.save_incarnation(10)
        state.save_clock(76)  # as after a clock that was fast
    with StateDirectory.open(path) as state:
        assert state.record.next_incarnation(0) == 9001
        assert state.record.clock == 76
    assert not list(path.glob("*.new"))


def test_up_to_where_floors_were_seen_and_dropped_comes_back(tmp_path: Path) -> None:
    seen = {0xFEDC_BA98_7654_3210: clock_from_unix_seconds(time.time() + 5), 1: 2}
    horizon = {1: 1}
    with StateDirectory.open(tmp_path) as state:
        assert state.record.floors_seen == state.record.floors_horizon == {}
        state.save_clock(5, floors_horizon=horizon)
        state.save_clock(4, seen)
    with StateDirectory.open(tmp_path) as state:
        assert (state.record.clock, state.record.floors_seen, state.record.floors_horizon) == (
            4,
            seen,
            horizon,
        )
        state.record.next_incarnation(7)
        state.save_clock(6)
        written = (tmp_path / "state.json").stat().st_mtime_ns
        state.save_clock(6, seen, horizon)
        assert (tmp_path / "state.json").stat().st_mtime_ns == written, "nothing had changed"
    with StateDirectory.open(tmp_path) as state:
        assert (state.record.clock, state.record.floors_seen, state.record.floors_horizon) == (
            6,
            seen,
            horizon,
        )


def test_a_state_file_of_an_earlier_version(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"format":1,"incarnation":3,"clock":4}\n')
    with StateDirectory.open(tmp_path) as state:
        assert (state.record.clock, state.record.floors_seen, state.record.floors_horizon) == (4, {}, {})
        assert state.record.next_incarnation(0) == 4


@pytest.mark.parametrize("clock", ["-1", str(1 << 63), str(1 << 70), "1.5", '"7"', "null", "[]"])
def test_a_clock_that_was_edited_is_made_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: str
) -> None:
    seen = '"floors_seen":{"000000000000000a":7,"000000000000000b":9}'
    (tmp_path / "state.json").write_text(f'{{"format":1,"incarnation":3,"clock":{clock},{seen}}}')
    with StateDirectory.open(tmp_path) as state:
        assert state.record.clock == 9, "up to there floors were seen"
        assert "no usable clock" in caplog.text
        assert state.record.next_incarnation(0) == 4
        state.save_clock(1 << 64)  # none that the next start would not believe
    with StateDirectory.open(tmp_path) as state:
        assert state.record.clock == (1 << 63) - 1


def test_an_incarnation_that_was_edited_is_made_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One above it would be nonsense to all others."""
    highest = (1 << 62) - 1
    (tmp_path / "state.json").write_text(f'{{"format":1,"incarnation":{highest},"clock":4}}')
    with StateDirectory.open(tmp_path) as state:
        assert state.record.next_incarnation(1_800_000_000_000) == 1_800_000_000_000
        assert "an incarnation of the far future" in caplog.text


def test_an_empty_directory_holds_nothing(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path) as state:
        assert state.floors.load() == []
        assert state.load_addresses() == []
        assert state.record.clock == 0
    assert ephemeral().peer_id != ephemeral().peer_id


def test_a_second_process_is_told_who_has_it(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom p2pstore.state.state_directory import StateDirectory\n"
        "StateDirectory.open(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid}.*--state-dir"):
            StateDirectory.open(tmp_path)
        other.kill()
        other.wait(60)
        StateDirectory.open(tmp_path).close()  # the lock died with its process


@pytest.mark.parametrize(
    ("content", "permissions", "complaint"),
    [
        (f"p2pstore identity 1\n{'ab' * 32}\n", 0o640, "chmod 600"),
        (f"p2pstore identity 1\n{'ab' * 32}\n", 0o604, "chmod 600"),
        (f"p2pstore identity 2\n{'ab' * 32}\n", 0o600, "format 2, this program knows up to 1"),
        (f"p2pstore identity 1\n{'ab' * 31}\n", 0o600, "is not an identity"),
        ("p2pstore identity 1\nxyz\n", 0o600, "is not an identity"),
        ("ab" * 32, 0o600, "is not an identity"),
        ("", 0o600, "is not an identity"),
        ("\N{SNOWMAN}", 0o600, "not a text file"),
        ("x" * 70_000, 0o600, "too long"),
    ],
)
def test_an_unfit_identity_is_refused_and_left_alone(
    tmp_path: Path, content: str, permissions: int, complaint: str
) -> None:
    path = tmp_path / "identity.key"
    path.write_text(content)
    path.chmod(permissions)
    with StateDirectory.open(tmp_path) as state:
        with pytest.raises(ConfigError, match=complaint) as error:
            state.identity()
        assert str(path) in str(error.value)
    assert path.read_text() == content
    assert "abab" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("state.json", b'{"format":2,"new":true}', "format 2, this program knows up to 1: upgrade"),
        ("state.json", b'{"format":1', "damaged"),
        ("state.json", b'{"format":0}', "never existed"),
        ("state.json", b'{"format":1,"clock":' + b"[" * 100_000, "damaged"),
        ("publishers.json", b'{"format":3}', "format 3, this program knows up to 1"),
        ("publishers.json", b'{"format":1,"publishers":[["n","m"]]}', "damaged"),
        ("publishers.json", b'{"format":1,"publishers":[["n","m","me"]]}', "not a peer id"),
        ("floors.bin", b"P2PSFLR\0\x02\0\0\0", "format 2, this program knows up to 1"),
        ("floors.bin", b"something else!!", "not a file of floors"),
    ],
)
def test_newer_and_foreign_files_are_refused_and_left_alone(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)

    def use() -> None:
        with StateDirectory.open(tmp_path) as state:
            state.load_addresses()
            state.load_publishers()
            state.floors.load()

    with pytest.raises(ConfigError, match=complaint):
        use()
    assert (tmp_path / name).read_bytes() == content


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_torn_tail_costs_only_the_torn_record(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, StateDirectory.open(folder) as state:
        path = Path(folder) / "floors.bin"
        ends = []
        for record in records(4):
            state.floors.append([record])
            ends.append(path.stat().st_size)
        cut = data.draw(st.integers(min_value=0, max_value=ends[-1]))
        os.truncate(path, cut)
        if data.draw(st.booleans()):  # a crash may leave zeros where the data should be
            os.truncate(path, cut + 20)
        whole = sum(end <= cut for end in ends)
        if cut < 12 and path.stat().st_size >= 12:  # the header itself is gone: not a torn tail
            return
        assert state.floors.load() == records(whole)
        state.floors.append([records(4)[3]])
        assert state.floors.load() == [*records(whole), records(4)[3]]


def test_a_full_disk_is_said_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.record.next_incarnation(10)

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(
                OSError, match=r"state.json cannot be written: No space.*free some space"
            ):
                state.record.next_incarnation(20)
        assert not (tmp_path / "state.json.new").exists()
        assert state.record.next_incarnation(11) == 11, "the failed save did not count"
    with StateDirectory.open(tmp_path) as state:
        assert state.record.next_incarnation(0) == 12


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be used.*--state-dir"):
        StateDirectory.open(tmp_path / "file")


def test_cluster_key_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    with pytest.raises(ConfigError, match=r"does not exist.*keygen"):
        load_cluster_key_file(path)
    key = new_cluster_key()
    path.write_text(key + "\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_cluster_key_file(path)
    path.chmod(0o600)
    assert load_cluster_key_file(path).keys == (bytes.fromhex(key),)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=r"cluster.key is not a regular file"):
        load_cluster_key_file(path)
    path.unlink()
    path.touch(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match=r"cluster.key, line 1"):
        load_cluster_key_file(path)


@pytest.mark.parametrize("name", ["state.json", "publishers.json", "floors.bin", "identity.key"])
def test_a_pipe_or_device_is_refused_without_waiting_for_it(tmp_path: Path, name: str) -> None:
    def use() -> None:
        with StateDirectory.open(tmp_path) as state:
            state.load_addresses()
            state.load_publishers()
            state.floors.load()
            state.identity()

    path = tmp_path / name
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file but a pipe"):
        use()
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file"):
        use()
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file but a directory"):
        use()


@pytest.mark.parametrize("planted", ["link", "dangling", "pipe", "directory", "hard link", "file"])
@pytest.mark.parametrize("name", ["addresses.json", "state.json", "floors.bin", "cluster.key"])
def test_a_planted_file_is_never_written_to(tmp_path: Path, name: str, planted: str) -> None:
    """A user who can write to the directory could have this user's files overwritten."""
    folder, victim = tmp_path / "state", tmp_path / "victim"
    victim.write_text("precious")
    with StateDirectory.open(folder) as state:
        for at in (folder / f"{name}.new", folder / name):
            if at.exists():
                at.unlink()
            match planted:
                case "link":
                    at.symlink_to(victim)
                case "dangling":
                    at.symlink_to(tmp_path / "made")
                case "pipe":
                    os.mkfifo(at)
                case "directory" if at.name != name:
                    at.mkdir()
                case "hard link":
                    at.hardlink_to(victim)
                case "file":
                    at.write_text("x")
        state.save_addresses(["10.0.0.1:1"])
        state.save_invite(Invite("c", ("10.0.0.1:1",), (bytes(range(32)),)))
        state.record.next_incarnation(7)
        state.floors.replace(records(1))
        state.save_publication("v", b"body")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made").exists()
    with StateDirectory.open(folder) as state:
        assert state.load_addresses() == ["10.0.0.1:1"]
        assert state.floors.load() == records(1)
        assert state.load_publications() == [("v", b"body")]
        assert not state.damage


def test_links_among_the_files_are_not_followed_by_appending_or_locking(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"P2PSFLR\0\x01\0\0\0")
    folder = tmp_path / "state"
    with StateDirectory.open(folder) as state:
        (folder / "floors.bin").symlink_to(victim)
        with pytest.raises(ConfigError, match=r"floors.bin is not a regular file but a link"):
            state.floors.append(records(1))
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"lock is not a regular file but a link"):
        StateDirectory.open(folder)
    assert victim.stat().st_size == 12


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But root's, as in containers, and with a word about what to do."""
    own, owner = os.geteuid(), tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    if owner == 0:
        StateDirectory.open(tmp_path).close()
        os.chown(tmp_path, own + 2, -1)
    with pytest.raises(ConfigError, match=rf"belongs to .*chown {own + 1} {tmp_path}"):
        StateDirectory.open(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
@pytest.mark.parametrize("name", ["identity.key", "state.json", "invite", "floors.bin"])
def test_a_file_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    """In a directory that others may write to, it was planted."""
    with StateDirectory.open(tmp_path) as state:
        state.identity()
        state.record.next_incarnation(1)
        state.floors.load()
    (tmp_path / name).touch()
    os.chown(tmp_path / name, 65534, -1)
    with pytest.raises(ConfigError, match=rf"{name} belongs to .*, who may have planted it"):
        StateDirectory.open(tmp_path)
    os.chown(tmp_path / name, 0, -1)
    StateDirectory.open(tmp_path).close()


# --- damage ----------------------------------------------------------------------------------


def saved(folder: Path, count: int = 40) -> bytes:
    """A state directory with floors that are all said to be seen; the bytes of its `floors.bin`."""
    with StateDirectory.open(folder) as state:
        state.floors.append(records(count))
        state.save_clock(5, {1: 7}, {1: 3})
    return (folder / "floors.bin").read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_flipped_bit_costs_one_record_and_is_said(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = bytearray(saved(Path(folder)))
        # A digit of the format may turn it into that of a later program.
        at = data.draw(st.integers(min_value=0, max_value=len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(min_value=0, max_value=7))
        Path(folder, "floors.bin").write_bytes(whole)
        with StateDirectory.open(folder) as state:
            assert state.record.floors_seen == {1: 7}
            found = state.floors.load()
            left = [each for each in records(40) if each in found]
            assert found == left
            assert len(found) >= 39
            assert state.damage
            assert state.record.floors_seen == {}
            assert state.record.floors_horizon == {1: 3}
            state.floors.append(records(41)[40:])
        with StateDirectory.open(folder) as state:
            assert state.floors.load() == [*left, *records(41)[40:]]
            assert state.record.floors_seen == {}
            assert not state.damage


@pytest.mark.parametrize("cut", [0, 5, 12, 100, -1, None])
def test_a_file_of_floors_that_is_shorter_than_it_was_has_lost_some(
    tmp_path: Path, cut: int | None
) -> None:
    """A torn tail is only what was never said to be on the disk."""
    whole = saved(tmp_path)
    if cut is None:
        (tmp_path / "floors.bin").unlink()
    else:
        (tmp_path / "floors.bin").write_bytes(whole[:cut])
    with StateDirectory.open(tmp_path) as state:
        left = state.floors.load()
        assert left == records(40)[: len(left)]
        assert state.damage
        assert state.record.floors_seen == {}


def test_a_tail_that_was_never_promised_is_torn(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.floors.append(records(3))
        state.save_clock(5, {1: 7})
        state.floors.append(records(4)[3:])  # and the machine crashes
    whole = (tmp_path / "floors.bin").read_bytes()
    for tail in (whole[:-1], whole[:-20], whole[:-10] + bytes(10), whole + b"\0" * 50):
        (tmp_path / "floors.bin").write_bytes(tail)
        with StateDirectory.open(tmp_path) as state:
            assert state.floors.load()[:3] == records(3)
            assert not state.damage
            assert state.record.floors_seen == {1: 7}


def test_a_crash_while_floors_are_compacted_looks_like_no_damage(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.floors.append(records(40))
        state.save_clock(5, {1: 7})
        state.floors.replace(records(2))  # and the process is killed
    with StateDirectory.open(tmp_path) as state:
        assert state.floors.load() == records(2)
        assert not state.damage
        assert state.record.floors_seen == {1: 7}


def test_floors_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """It says neither how much it wrote nor a sum."""
    whole = saved(tmp_path)
    (tmp_path / "state.json").write_text('{"format":1,"incarnation":3,"clock":4,"floors_seen":{"1":7}}')
    with StateDirectory.open(tmp_path) as state:
        assert state.floors.load() == records(40)
        assert state.record.floors_seen == {1: 7}
    (tmp_path / "state.json").write_text('{"format":1,"incarnation":3,"clock":4,"floors_seen":{"1":7}}')
    (tmp_path / "floors.bin").write_bytes(whole[:-3])
    with StateDirectory.open(tmp_path) as state:
        assert state.floors.load() == records(39)
        assert not state.damage


FUTURE = clock_from_unix_seconds(time.time() + 86_400 * 365)
CLOCK_NOW = clock_from_unix_seconds(time.time())


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("floors_horizon", {"1": FUTURE, "2": 5}),
        ("floors_horizon", {"1": -1}),
        ("floors_horizon", {"1": 1.5}),
        ("floors_horizon", {"xyz": 1}),
        ("floors_horizon", 7),
        ("floors_horizon", None),
        ("floors_seen", {"1": FUTURE, "2": 5}),
        ("floors_seen", "all"),
        ("incarnation", -1),
        ("incarnation", "5"),
        ("incarnation", True),
        ("incarnation", 1 << 64),
        ("incarnation", 1 << 61),
        ("incarnation", None),
        ("incarnation", 1000 * (int(time.time()) + 86_400 * 400)),
    ],
)
def test_implausible_state_is_said_and_healed(
    tmp_path: Path, field: str, value: object, summed: bool
) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.record.next_incarnation(10)
        state.save_clock(CLOCK_NOW, {1: 7, 2: 5}, {2: 5})
    edited = json.loads((tmp_path / "state.json").read_text()) | {field: value}
    if not summed:
        del edited["sum"]
    (tmp_path / "state.json").write_text(json.dumps(edited))
    now_ms = int(time.time() * 1000)
    with StateDirectory.open(tmp_path) as state:
        assert state.damage
        assert state.record.clock == CLOCK_NOW
        assert now_ms <= state.record.next_incarnation(now_ms) <= now_ms + 1
        newest = max(
            [*state.record.floors_seen.values(), *state.record.floors_horizon.values()], default=0
        )
        assert newest <= CLOCK_NOW
    with StateDirectory.open(tmp_path) as state:
        assert not state.damage


@pytest.mark.parametrize(("field", "value"), [("floors_bytes", "many"), ("sum", 5), ("memory", 7)])
def test_fields_that_guard_others_may_be_nonsense(tmp_path: Path, field: str, value: object) -> None:
    saved(tmp_path)
    edited = json.loads((tmp_path / "state.json").read_text()) | {field: value}
    (tmp_path / "state.json").write_text(json.dumps(edited))
    with StateDirectory.open(tmp_path) as state:
        assert state.damage
        assert state.record.floors_seen == {}
        assert state.record.last_segment_id == b""


def test_a_plausible_edit_is_not_believed_either(tmp_path: Path) -> None:
    """That floors were seen which were not would bring back what was removed."""
    saved(tmp_path)
    text = (tmp_path / "state.json").read_text()
    (tmp_path / "state.json").write_text(text.replace('":7', '":8'))
    with StateDirectory.open(tmp_path) as state:
        assert state.record.floors_seen == {}
        assert state.damage
    unsummed = json.loads(text)
    del unsummed["sum"]
    (tmp_path / "state.json").write_text(json.dumps(unsummed))
    with StateDirectory.open(tmp_path) as state:
        assert state.record.floors_seen == {}
        assert state.damage
    (tmp_path / "state.json").write_text(json.dumps(json.loads(text), indent=4))  # spelled anew only
    with StateDirectory.open(tmp_path) as state:
        assert state.record.floors_seen == {1: 7}
        assert not state.damage


def test_an_incarnation_of_a_clock_that_was_fast_is_kept(tmp_path: Path) -> None:
    """Others know this peer by it, and would not hear it by an earlier one."""
    in_a_year = int((time.time() + 366 * 86_400) * 1000)
    with StateDirectory.open(tmp_path) as state:
        assert state.record.next_incarnation(in_a_year) == in_a_year
    with StateDirectory.open(tmp_path) as state:
        assert state.record.next_incarnation(int(time.time() * 1000)) == in_a_year + 1
        assert not state.damage


def test_of_a_clock_that_was_fast_what_was_seen_stays_seen(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.save_clock(CLOCK_NOW, {1: FUTURE, 2: 5}, {1: FUTURE, 2: 5})
    with StateDirectory.open(tmp_path) as state:
        assert CLOCK_NOW <= state.record.floors_seen[1] < FUTURE
        assert state.record.floors_seen[2] == 5
        assert state.record.floors_horizon == {2: 5}
        assert len(state.damage) == 2


def test_a_clock_that_was_not_set_yet_judges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.record.next_incarnation(int(time.time() * 1000))
        state.save_clock(CLOCK_NOW, {1: CLOCK_NOW}, {2: CLOCK_NOW})
    monkeypatch.setattr(time, "time", lambda: 30.0)
    with StateDirectory.open(tmp_path) as state:
        assert not state.damage
        assert state.record.floors_seen == {1: CLOCK_NOW}


@pytest.mark.parametrize(
    "content",
    [
        b'{"format":3}',
        b'{"format":1,"addresses":7}',
        b'{"format":1,"addresses":' + b"[" * 100_000,
        b"\xff\xfe",
        b"",
        b"[]",
        None,
    ],
)
def test_a_damaged_address_book_is_begun_anew(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "addresses.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with StateDirectory.open(tmp_path) as state:
        assert state.load_addresses() == []
        assert len(state.damage) == 1
        state.save_addresses(["10.0.0.1:1"])
        assert state.load_addresses() == ["10.0.0.1:1"]


def test_lines_of_the_address_book_that_are_no_addresses_are_left_out(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path) as state:
        state.save_addresses(["10.0.0.1:1", "nonsense", "host:99999", "[::1]:2"])
        assert state.load_addresses() == ["10.0.0.1:1", "[::1]:2"]
        assert state.damage


def test_a_publication_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path) as state:
        for name in ("a", "b"):
            state.save_publication(name, name.encode())
        os.mkfifo(tmp_path / "published" / "pipe")
        (tmp_path / "published" / "link").symlink_to(tmp_path / "identity.key")
        assert state.load_publications() == [("a", b"a"), ("b", b"b")]
        assert len(state.damage) == 2


VERSION = bytes(32)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def write_version(folder: Path) -> None:
    write_part(folder, VERSION, {1}, 3)
    assert part_of(folder, VERSION, 3) == frozenset({1})


def write_tensor(folder: Path) -> None:
    write_one(str(folder / "one.safetensors"), "x", "uint8", [3], memoryview(b"abc"))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_version, f".p2pstore/{VERSION.hex()}.part.new"),
        (write_version, f".p2pstore/{VERSION.hex()}.part"),
        (write_tensor, "one.safetensors.part"),
        (lambda folder: replace_file(folder / "file", b"new"), "file.new"),
        (lambda folder: replace_file(folder / "file", b"new"), "file"),
    ],
)
def test_planted_links_are_replaced(
    tmp_path: Path, victim: Path, write: Callable[[Path], None], name: str
) -> None:
    folder = tmp_path / "folder"
    (folder / ".p2pstore").mkdir(parents=True)
    (folder / name).symlink_to(victim)
    write(folder)
    assert victim.read_text() == "precious"
    assert not any(each.is_symlink() for each in folder.rglob("*"))


def test_only_regular_files_are_opened(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
            PieceRecord(tmp_path / name, VERSION, 8, bytes(36))
        with Folder(tmp_path) as folder:
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
                    folder.open(name, flags)
    state = tmp_path / ".p2pstore"
    state.mkdir()
    os.mkfifo(state / f"{VERSION.hex()}.manifest")
    assert kept_manifest(tmp_path, VERSION) is None
    assert victim.read_text() == "precious"


def test_a_tensor_file_is_written_where_it_should_be(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_tensor(tmp_path)
    assert read_one(str(tmp_path / "one.safetensors"), "x")[0].tolist() == [97, 98, 99]


async def test_a_full_disk_is_told_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateDirectory.open(tmp_path / "state") as state:
        saver = StateSaver(Harness().core, state)
        await saver.save()
        assert saver.problem == ""

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, f"{tmp_path} cannot be written: No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(state, "save_addresses", full)
            await saver.save()
        assert saver.problem == "No space left on device"
        await saver.save()
        assert saver.problem == ""


async def test_floors_that_come_while_all_are_written_anew_are_in_the_file(tmp_path: Path) -> None:
    """All of many floors are collected in steps, between which others are heard of."""
    world = Harness()
    for number in range(300):
        world.core.floors.write(digest_of(f"k{number}"), Version(1, 1), world.now)
    world.core.take_effects()
    with StateDirectory.open(tmp_path / "state") as state:
        saver = StateSaver(world.core, state)
        state.floors.record_count = 1 << 20  # superseded ones
        late: list[SignedRecord] = []

        async def hear() -> None:
            for number in range(300, 320):
                late.append(world.core.floors.write(digest_of(f"k{number}"), Version(1, 1), world.now))
                saver.add(late[-1])
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            nursery.start_soon(saver.save)
        await saver.save()
        found = {signed.body for signed in state.floors.load()}
    assert found == {signed.body for signed in world.gossip.cluster_records.dump()}
    assert {signed.body for signed in late} <= found
