"""A peer's default name, and where it keeps its files."""

from __future__ import annotations

import os
import re
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pstore.access.invite import Invite, parse_invite
from p2pstore.access.keyring import KEYLESS, Role
from p2pstore.config import USER_KEY_NAME, PeerConfig
from p2pstore.errors import AuthenticationFailed, ConfigError
from p2pstore.settings import Settings, load_settings
from p2pstore.state import places as user_key
from p2pstore.state.places import (
    BY_NAME,
    HOST_NAME,
    find_user_ring,
    kept,
    name_in_use,
    ring_of_the_keyless,
    settle,
    state_root,
    user_ring,
)
from p2pstore.state.state_directory import StateDirectory, StateDirectoryInUse
from tests.present import present

KEY = bytes(range(32))
INVITE = Invite("blue", ("10.0.0.1:17946",), (KEY,))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "mooncake-p2p"


def keep_joined(invite: Invite, state_dir: str) -> None:
    with kept(invite, state_dir):
        pass


def said(**flags: object) -> Settings:
    return load_settings(None, {}, flags)


def test_without_a_name_the_first_free_one_after_the_host(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "n")
    settled = settle(said())
    assert settled.values == {"name": "n", "state_dir": str(home / "n")}
    assert settled.origins["name"] == HOST_NAME
    with StateDirectory.open(home / "n"), StateDirectory.open(home / "n-2"):
        settled = settle(said())
        assert settled.values["state_dir"] == str(home / "n-3")
        assert settled.config().name == "n-3"
        assert settled.origins["name"] == f"{HOST_NAME}, as 2 of that name run here"
        assert settled.origins["state_dir"] == BY_NAME
        assert name_in_use(settled) is None
    assert settle(said()).values["name"] == "n"
    assert not (home / "n-3").exists()  # nothing is made by asking


@pytest.mark.parametrize("origin", ["--name", "MOONCAKE_P2P_NAME"])
def test_a_name_that_was_said_is_never_replaced(home: Path, origin: str) -> None:
    flags = {"name": "n"} if origin == "--name" else {}
    settings = load_settings(None, {} if flags else {"MOONCAKE_P2P_NAME": "n"}, flags)
    assert name_in_use(settle(settings)) is None
    with StateDirectory.open(home / "n"):
        settled = settle(settings)
        assert settled.values == {"name": "n", "state_dir": str(home / "n")}
        problem = name_in_use(settled)
        assert problem is not None
        assert re.match(rf"{origin}: a peer named n runs .* another --name, or end", str(problem))
        assert name_in_use(settle(settings.over({"state_dir": str(home / "x")}, "file"))) is None


def test_a_name_in_use_is_told_by_its_socket_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a peer with a state directory of its own would be a second one of that name, in a cluster of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run" / "mooncake-p2p").mkdir(mode=0o755, parents=True)
    settings = said(name="n", state_dir=str(home / "elsewhere"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "run" / "mooncake-p2p" / "n.sock"))
        listener.listen()
        for each in (settings, said(name="n")):
            assert "leave --socket" in str(name_in_use(settle(each)))
        assert name_in_use(settle(settings.over({"socket": "/own.sock"}, "file"))) is None
        assert name_in_use(settle(said(name="m"))) is None
    assert name_in_use(settle(settings)) is None


def test_a_state_directory_that_was_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.parent)
    settled = settle(said(state_dir="here", name="n"))
    assert settled.values["state_dir"] == str(home.parent / "here")
    assert settled.origins["state_dir"] == "--state-dir"


def test_a_name_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"--name: 'a/b'"):
        settle(said(name="a/b"))


def test_state_of_root_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert state_root() == Path("/var/lib/mooncake-p2p")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/user")
    assert state_root() == Path("/home/user/.local/state/mooncake-p2p")


@pytest.mark.parametrize("without", [None, "/", "", "relative"])
def test_a_user_without_a_home_has_state_beside_its_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: str | None
) -> None:
    """Container runtimes say "/" of a user without an entry in passwd."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("HOME", raising=False)
    if without is not None:
        monkeypatch.setenv("HOME", without)
    assert state_root() == tmp_path / "mooncake-p2p-12345" / "state"


def test_a_setting_is_above_an_invite(home: Path) -> None:
    settled = settle(said(name="n", cluster="red"), INVITE)
    config = settled.checked()
    assert (config.cluster, config.bootstrap) == ("red", ["10.0.0.1:17946"])
    assert config.cluster_key_file == str(home / "n" / "cluster.key")
    assert settled.origins["bootstrap"] == settled.origins["cluster_key_file"] == "the invite"
    own = settle(said(name="n", cluster_key_file="own", bootstrap=["b:1"]), INVITE).config()
    assert (own.cluster_key_file, own.bootstrap, own.cluster) == ("own", ["b:1"], "blue")
    without = settle(said(name="n"), Invite("blue", ("10.0.0.1:17946",)))
    assert without.config().cluster_key_file is None


def test_the_invite_of_an_earlier_start_is_remembered(home: Path) -> None:
    keep_joined(INVITE, str(home / "n"))
    for name in ("invite", "cluster.key"):
        assert stat.S_IMODE((home / "n" / name).stat().st_mode) == 0o600
    assert KEY.hex() in (home / "n" / "cluster.key").read_text()
    settled = settle(said(name="n"))
    assert settled.config().cluster == "blue"
    assert settled.config().cluster_key_file == str(home / "n" / "cluster.key")
    assert settled.origins["bootstrap"] == f"the invite kept in {home / 'n'}"
    assert settle(said(name="other")).config().bootstrap == []

    later = Invite("green", ("10.0.0.2:1",), (b"2" * 32,))
    assert settle(said(name="n"), later).config().cluster == "green"
    keep_joined(later, str(home / "n"))
    assert settle(said(name="n")).config().bootstrap == ["10.0.0.2:1"]


@pytest.mark.parametrize("before", [None, Invite("red", ("10.0.0.9:1",))])
def test_an_invite_that_admits_no_peer_is_forgotten(home: Path, before: Invite | None) -> None:
    """Else every later start would go by it."""
    if before is not None:
        keep_joined(before, str(home / "n"))
    with pytest.raises(AuthenticationFailed), kept(INVITE, str(home / "n")):
        assert settle(said(name="n")).config().cluster == "blue"
        raise AuthenticationFailed("wrong cluster key")
    config = settle(said(name="n")).config()
    assert (config.cluster, config.cluster_key_file) == ("red" if before else "default", None)
    assert not (home / "n" / "cluster.key").exists()
    with pytest.raises(KeyboardInterrupt), kept(INVITE, str(home / "n")):
        raise KeyboardInterrupt  # the others may come later
    assert settle(said(name="n")).config().cluster == "blue"


def test_a_running_peer_keeps_its_key(home: Path) -> None:
    keep_joined(INVITE, str(home / "n"))
    with StateDirectory.open(home / "n"), pytest.raises(StateDirectoryInUse, match="in use by process"):
        keep_joined(Invite("green", ("10.0.0.2:1",), (b"2" * 32,)), str(home / "n"))
    assert KEY.hex() in (home / "n" / "cluster.key").read_text()


def test_a_state_directory_that_is_a_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = settle(said(name="n", state_dir=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"the state directory .* cannot be used"):
        StateDirectory.open(settings.values["state_dir"])


def test_a_kept_invite_that_is_damaged_or_open_to_others(home: Path) -> None:
    keep_joined(INVITE, str(home / "n"))
    file = home / "n" / "invite"
    file.write_text(file.read_text()[:-5])
    with pytest.raises(ConfigError, match="torn"):
        settle(said(name="n"))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"invite is how this peer joined, but others may read it"):
        settle(said(name="n"))


def test_a_kept_invite_whose_key_is_gone_is_not_followed_without_it(home: Path) -> None:
    keep_joined(INVITE, str(home / "n"))
    kept = (home / "n" / "invite").read_text()
    assert parse_invite(kept) == Invite("blue", ("10.0.0.1:17946",))  # as earlier versions read it
    key = home / "n" / "cluster.key"
    key.unlink()
    with pytest.raises(ConfigError, match=rf"{key} is missing.*--cluster-key-file"):
        settle(said(name="n"))
    assert settle(said(name="n", cluster_key_file="own")).config().cluster_key_file == "own"
    key.symlink_to(key)  # cannot be read, which its reader reports
    assert settle(said(name="n")).config().cluster_key_file == str(key)
    keep_joined(Invite("blue", ("10.0.0.1:17946",)), str(home / "m"))
    assert settle(said(name="m")).config().cluster_key_file is None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key goes; the second choice is empty as well."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    second = tmp_path / "second"
    second.mkdir(mode=0o700)
    monkeypatch.setattr(user_key, "own_directory", lambda: second)
    return tmp_path / "state" / "mooncake-p2p"


def test_the_first_peer_makes_it_and_the_others_find_it(place: Path) -> None:
    assert find_user_ring() is None
    assert ring_of_the_keyless().keys == (KEYLESS,)
    ring = user_ring()
    assert ring.of_user
    assert ring.role is Role.MEMBER
    found = present(find_user_ring())
    assert user_ring().keys == found.keys == ring.keys != (KEYLESS,)
    assert ring_of_the_keyless().keys == (*ring.keys, KEYLESS)
    assert (place / USER_KEY_NAME).stat().st_mode & 0o777 == 0o600
    assert os.listdir(place) == [USER_KEY_NAME], "nothing is left of making it"


@pytest.mark.usefixtures("place")
def test_peers_that_start_at_once_agree() -> None:
    with ThreadPoolExecutor(16) as threads:
        rings = list(threads.map(lambda _: user_ring().keys, range(64)))
    assert len(set(rings)) == 1


def test_a_readable_file_or_a_link_is_refused(place: Path, tmp_path: Path) -> None:
    user_ring()
    key = place / USER_KEY_NAME
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        user_ring()
    planted = tmp_path / "planted"
    key.rename(planted)
    planted.chmod(0o600)
    key.symlink_to(planted)
    with pytest.raises(ConfigError, match="not a regular file but a link"):
        user_ring()


def test_it_goes_beside_the_sockets_where_the_first_place_cannot_be_used(
    place: Path, tmp_path: Path
) -> None:
    place.parent.write_text("a file where a directory should be")
    ring = user_ring()
    assert (tmp_path / "second" / USER_KEY_NAME).exists()
    found = present(find_user_ring())
    assert found.keys == ring.keys
    (tmp_path / "second" / USER_KEY_NAME).unlink()
    (tmp_path / "second").chmod(0o777)
    with pytest.raises(ConfigError, match="give --cluster-key-file") as error:
        user_ring()
    assert "open to other users" in str(error.value)


def test_no_peer_has_the_name_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"name: 'user\.key'"):
        PeerConfig(name=USER_KEY_NAME).checked()
