"""Paths of local sockets, with other users about: trusted owners, and access."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pstore.errors import ConfigError, NoLocalPeer
from p2pstore.local import socket_paths as paths

STRANGER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for `/run` and the temporary directory; every user may pass."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv(paths.SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", tmp_path / "run" / "mooncake-p2p")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    return tmp_path


def as_stranger(action: Callable[[], str]) -> str:
    """The result or error of `action` in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            outcome = action()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome


def listen(path: Path, mode: int = 0o600) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(mode)
    listener.listen()
    return listener


@needs_root
def test_the_mode_of_the_socket_decides_who_gets_in(place: Path) -> None:
    path = paths.default_socket_path("a", shared=True)
    assert path == place / "run" / "mooncake-p2p" / "a.sock"
    with listen(path, 0o600):
        assert as_stranger(lambda: str(paths.find_socket())).startswith("NoLocalPeer")
        path.chmod(0o666)
        assert as_stranger(lambda: str(paths.find_socket())) == str(path)
        path.chmod(0o660)
        os.chown(path, -1, STRANGER)
        assert as_stranger(lambda: str(paths.find_socket())) == str(path)
    assert "PermissionError" in as_stranger(lambda: str((path.parent / "squat").write_text("")))


def test_a_closed_directory_of_an_earlier_version_is_opened(place: Path) -> None:
    directory = place / "run" / "mooncake-p2p"
    directory.mkdir(mode=0o700)
    paths.default_socket_path("a")
    assert directory.stat().st_mode & 0o777 == 0o755


def test_shared_sockets_are_not_put_where_nobody_gets(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = place / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert paths.default_socket_path("a").parent.parent == session
    assert paths.default_socket_path("a", shared=True).parent.parent == place / "run"
    assert paths.unreachable_by_others(session / "mooncake-p2p" / "a.sock") == session
    assert paths.unreachable_by_others(place / "run" / "mooncake-p2p" / "a.sock") is None


def test_a_directory_whose_path_is_too_long_for_a_socket_is_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = place / ("x" * paths.MAX_PATH_BYTES)
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    found = paths.default_socket_path("a")
    assert found == place / "run" / "mooncake-p2p" / "a.sock"
    with listen(found):
        assert paths.find_socket() == found
    with pytest.raises(ConfigError, match=r"longer than 107 bytes.*longer than.*--socket"):
        paths.default_socket_path("a" * paths.MAX_PATH_BYTES)


@needs_root
def test_a_directory_that_a_stranger_made_first_is_not_used(place: Path) -> None:
    """In a place where all users may make directories. Neither peers nor clients fall for it."""
    (place / "run").chmod(0o1777)
    squatted = [place / "run" / "mooncake-p2p", place / "tmp" / "mooncake-p2p-0"]

    def squat() -> str:
        for directory in squatted:
            directory.mkdir(mode=0o755)
        return "squatted"

    assert as_stranger(squat) == "squatted"
    with pytest.raises(ConfigError, match=r"belongs to another user.*belongs to another user.*--socket"):
        paths.default_socket_path("a")


@needs_root
def test_a_socket_of_a_stranger_is_no_peer(place: Path) -> None:
    directory = paths.default_socket_path("a").parent
    with listen(directory / "a.sock"):
        assert paths.find_socket() == directory / "a.sock"
        os.chown(directory / "a.sock", STRANGER, -1)
        with pytest.raises(NoLocalPeer):
            paths.find_socket()
        # A user that was given the directory by root, as a service is, is trusted with its contents.
        os.chown(directory, STRANGER, -1)
        assert paths.find_socket() == directory / "a.sock"
        (place / "run").chmod(0o1777)
        with pytest.raises(NoLocalPeer):
            paths.find_socket()


def test_a_directory_that_others_may_write_to_is_not_used(place: Path) -> None:
    directory = paths.default_socket_path("a").parent
    with listen(directory / "a.sock"):
        directory.chmod(0o775)
        with pytest.raises(NoLocalPeer):
            paths.find_socket()
    assert paths.default_socket_path("a").parent.parent == place / "tmp"


def test_a_peer_is_found_by_its_name_or_those_that_run_are_named(place: Path) -> None:
    with pytest.raises(NoLocalPeer, match=r"no peer called 'a' .*`mooncake-p2p join` starts one"):
        paths.socket_of("a")
    first, second = paths.default_socket_path("a"), paths.default_socket_path("b")
    with listen(first), listen(second):
        assert (paths.socket_of("a"), paths.socket_of("b")) == (first, second)
        with pytest.raises(NoLocalPeer, match=r"no peer called 'c' .*these do: a, b;"):
            paths.socket_of("c")
    with pytest.raises(NoLocalPeer):
        paths.socket_of("a")  # its file is there, but no peer
