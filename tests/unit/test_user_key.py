"""The key that keyless peers of one user share: made once, and private."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pstore.access.keyring import KEYLESS, Role
from p2pstore.config import USER_KEY_NAME, PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.state import places as user_key
from p2pstore.state.places import find_user_ring, ring_of_the_keyless, user_ring
from tests.present import present


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
