"""Identities are those of libp2p, of which a peer imports only the parts that it uses."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.records import format_peer_id, member_of
from tests.commands import ran

SEED = bytes(range(32))


@given(st.binary(min_size=32, max_size=32))
def test_the_peer_id_is_libp2ps(seed: bytes) -> None:
    identity = Identity(seed)
    theirs = ID.from_pubkey(create_new_key_pair(seed).public_key)
    assert identity.peer_id == theirs.to_bytes()
    assert format_peer_id(identity.peer_id) == theirs.to_string()
    assert identity.member == member_of(identity.peer_id)


def test_libp2p_accepts_the_signature() -> None:
    public_key = create_new_key_pair(SEED).public_key
    assert public_key.verify(b"message", Identity(SEED).sign(b"message"))


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=511))
def test_one_flipped_bit_is_noticed(message: bytes, bit: int) -> None:
    identity, verifier = Identity(SEED), Ed25519Verifier()
    signature = identity.sign(message)
    assert len(signature) == 64
    assert verifier.verify(identity.peer_id, message, signature)
    assert not verifier.verify(identity.peer_id, message + b"x", signature)
    wrong = bytearray(signature)
    wrong[bit // 8] ^= 1 << bit % 8
    assert not verifier.verify(identity.peer_id, message, bytes(wrong))
    assert not verifier.verify(Identity(bytes(32)).peer_id, message, signature)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_the_verifier_never_raises(peer_id: bytes, signature: bytes) -> None:
    assert not Ed25519Verifier().verify(peer_id, b"message", signature)
    assert not Ed25519Verifier().verify(Identity(SEED).peer_id, b"message", signature)


def test_the_verifier_forgets_the_least_recently_used_key() -> None:
    identities = [Identity(bytes([number]) * 32) for number in range(3)]
    verifier = Ed25519Verifier(max_cached_keys=2)
    for number in (0, 1, 0, 2, 0, 1):
        identity = identities[number]
        assert verifier.verify(identity.peer_id, b"m", identity.sign(b"m"))
        assert verifier._key.cache_info().currsize <= 2
    assert verifier._key.cache_info().misses == 4, "the second one had to go"


def test_a_seed_has_32_bytes_and_is_not_shown() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        Identity(bytes(31))
    assert SEED.hex() not in repr(Identity(SEED))
    assert format_peer_id(Identity(SEED).peer_id) in repr(Identity(SEED))


def run(program: str, *, path: Path | None = None) -> str:
    done = ran(
        [sys.executable, "-c", program],
        check=True,
        env=None if path is None else {"PYTHONPATH": f"{path}:{':'.join(sys.path)}"},
    )
    return done.stdout


def test_a_peer_imports_what_it_uses() -> None:
    run(
        "import sys, p2pstore.peer.api\n"
        "for name in ('libp2p.host', 'libp2p.relay', 'libp2p.transport.manager', 'zeroconf', 'requests'):\n"
        "    assert name not in sys.modules, name\n"
    )


@pytest.mark.parametrize(
    "use",
    [
        "import libp2p; assert not hasattr(libp2p, 'no_such_thing'); libp2p.new_host()",
        "from libp2p.transport import TransportManager\n"
        "import libp2p.crypto.ed25519; libp2p.crypto.ed25519.create_new_key_pair()",
        "import libp2p.network.swarm; assert libp2p.network.swarm.Swarm\n"
        "from libp2p import new_host; new_host()",
    ],
)
def test_a_program_with_a_peer_has_all_of_libp2p(use: str) -> None:
    run(f"import p2pstore.peer.api\n{use}")


def test_libp2p_that_was_imported_before_stays_as_it_is() -> None:
    run(
        "import libp2p\n"
        "before = libp2p.new_host, vars(libp2p).copy()\n"
        "import p2pstore.peer.api\n"
        "assert type(libp2p).__name__ == 'module' and vars(libp2p).items() >= before[1].items()\n"
    )


def test_a_package_whose_code_fails_fails_each_time_it_is_asked(tmp_path: Path) -> None:
    package = tmp_path / "broken_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('broken')\nname = 1\n")
    (package / "part.py").write_text("works = True\n")
    said = run(
        "from p2pstore.gossip.links.libp2p_parts import deferred\n"
        "with deferred('broken_package', 'there_is_none'):\n"
        "    from broken_package.part import works\n"
        "import broken_package\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        broken_package.name\n"
        "    except OSError as error:\n"
        "        print(works, error)\n",
        path=tmp_path,
    )
    assert said == "True broken\nTrue broken\n"
