"""Admission without sockets: acceptance, refusals, and the answers to both sides; and the key ring."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore import wire
from p2pstore.access.keyring import (
    KEYLESS,
    MAX_KEYS,
    AllowList,
    KeyRing,
    Role,
    add_key,
    key_id_of,
    new_cluster_key,
    parse_cluster_keys,
    parse_peer_id,
    parse_peer_ids,
    promote_key,
    reader_key_of,
    reader_keys,
    retire_keys,
)
from p2pstore.errors import ConfigError
from p2pstore.gossip.gossip_messages import Proof, Welcome
from p2pstore.gossip.links.admission import AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import format_peer_id
from p2pstore.wire import Code

ALICE, BOB, EVE = (Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3))
OLD, NEW, OTHER = (bytes([number]) * 32 for number in (11, 12, 13))


def pair(
    opener_keys: Sequence[bytes] = (NEW,),
    listener_keys: Sequence[bytes] = (NEW,),
    *,
    opener_cluster: str = "prod",
    listener_cluster: str = "prod",
    listener_sees: bytes = ALICE,
    opener_sees: bytes = BOB,
    opener_allows: AllowList | None = None,
    listener_allows: AllowList | None = None,
) -> tuple[Opener, Listener]:
    opener = Opener(
        ring=KeyRing(opener_keys),
        cluster=opener_cluster,
        own_id=ALICE,
        peer_id=opener_sees,
        nonce=b"a" * 32,
        software="p2pstore 1",
        allowed=opener_allows,
    )
    listener = Listener(
        ring=KeyRing(listener_keys),
        cluster=listener_cluster,
        own_id=BOB,
        peer_id=listener_sees,
        nonce=b"b" * 32,
        software="p2pstore 2",
        allowed=listener_allows,
    )
    return opener, listener


def shake(opener: Opener, listener: Listener) -> None:
    reply = listener.receive_hello(opener.hello())
    opener.receive_welcome(listener.receive_proof(opener.receive_reply(reply)))


@pytest.mark.parametrize(
    ("opener_keys", "listener_keys"),
    [([], []), ([NEW], [NEW]), ([NEW, OLD], [OLD]), ([OLD], [NEW, OLD]), ([OLD, NEW], [NEW, OLD])],
)
def test_a_common_key_admits_both(opener_keys: list[bytes], listener_keys: list[bytes]) -> None:
    opener, listener = pair(opener_keys, listener_keys)
    shake(opener, listener)
    assert opener.admitted
    assert listener.admitted
    assert (opener.version, listener.version) == (2, 2)


@pytest.mark.parametrize(
    ("opener_keys", "listener_keys", "reason"),
    [
        ([OLD], [NEW], "different keys"),
        ([NEW], [], "the opener has a cluster key, the listener has none"),
        ([], [NEW], "the listener has a cluster key, the opener has none"),
    ],
)
def test_without_a_common_key_nobody_is_admitted(
    opener_keys: list[bytes], listener_keys: list[bytes], reason: str
) -> None:
    opener, listener = pair(opener_keys, listener_keys)
    with pytest.raises(AdmissionRefused, match=reason) as refusal:
        shake(opener, listener)
    assert refusal.value.code == Code.AUTHENTICATION_FAILED
    assert "--cluster-key-file" in str(refusal.value)
    assert not listener.admitted
    assert not opener.admitted


def test_another_cluster_is_refused() -> None:
    with pytest.raises(AdmissionRefused, match="'test' calls cluster 'prod'") as refusal:
        shake(*pair(opener_cluster="test"))
    assert refusal.value.code == Code.WRONG_CLUSTER


def test_a_proof_is_for_these_two_peers_only() -> None:
    """Eve relays Alice's messages to Bob: Noise tells Bob that it is Eve who speaks."""
    with pytest.raises(AdmissionRefused, match="proof does not match"):
        shake(*pair(listener_sees=EVE))
    with pytest.raises(AdmissionRefused, match="proof does not match"):
        shake(*pair(opener_sees=EVE))


def test_versions_without_overlap_are_refused() -> None:
    opener, listener = pair()
    hello = msgspec.structs.replace(opener.hello(), min_version=7, max_version=9)
    with pytest.raises(AdmissionRefused, match="upgrade the older") as refusal:
        listener.receive_hello(hello)
    assert refusal.value.code == Code.PROTOCOL_MISMATCH
    reply = pair()[1].receive_hello(opener.hello())
    with pytest.raises(AdmissionRefused, match="upgrade the older"):
        opener.receive_reply(msgspec.structs.replace(reply, version=9))


def test_a_newer_opener_is_spoken_to_in_the_common_version() -> None:
    opener, listener = pair()
    hello = msgspec.structs.replace(opener.hello(), max_version=9)
    assert listener.receive_hello(hello).version == wire.MAX_CONTROL_VERSION


def test_a_proof_cannot_be_reflected() -> None:
    opener, listener = pair()
    reply = listener.receive_hello(opener.hello())
    with pytest.raises(AdmissionRefused, match="does not match"):
        listener.receive_proof(Proof(reply.key_id, reply.proof))
    opener, listener = pair()
    hello = msgspec.structs.replace(opener.hello(), nonce=listener.nonce)
    with pytest.raises(AdmissionRefused, match="repeats"):
        listener.receive_hello(hello)


@given(st.integers(min_value=0, max_value=255))
def test_a_flipped_bit_of_either_proof_is_refused(bit: int) -> None:
    def flip(proof: bytes) -> bytes:
        changed = bytearray(proof)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    opener, listener = pair()
    reply = listener.receive_hello(opener.hello())
    with pytest.raises(AdmissionRefused, match="does not match"):
        opener.receive_reply(msgspec.structs.replace(reply, proof=flip(reply.proof)))
    proof = opener.receive_reply(reply)
    with pytest.raises(AdmissionRefused, match="does not match"):
        listener.receive_proof(Proof(proof.key_id, flip(proof.proof)))
    assert not listener.admitted


def test_messages_out_of_order_and_of_wrong_shape_are_refused() -> None:
    opener, listener = pair()
    with pytest.raises(AdmissionRefused, match="before the hello"):
        listener.receive_proof(Proof(key_id_of(NEW), bytes(32)))
    with pytest.raises(AdmissionRefused, match="before the handshake"):
        opener.receive_welcome(Welcome())
    with pytest.raises(AdmissionRefused, match="nonce of 3 bytes"):
        listener.receive_hello(msgspec.structs.replace(opener.hello(), nonce=b"abc"))
    reply = listener.receive_hello(opener.hello())
    with pytest.raises(AdmissionRefused, match="this side does not hold"):
        opener.receive_reply(msgspec.structs.replace(reply, key_id=key_id_of(OTHER)))
    with pytest.raises(ValueError, match="nonce is 32 bytes"):
        Opener(ring=KeyRing(), cluster="c", own_id=ALICE, peer_id=BOB, nonce=b"", software="")


@pytest.mark.parametrize(
    ("opener_keys", "listener_keys", "key"),
    [([OLD], [NEW, OLD], OLD), ([OLD, NEW], [NEW, OLD], NEW), ([NEW, OLD], [OLD, NEW], OLD)],
)
def test_both_sides_remember_the_key_that_admitted_the_other(
    opener_keys: list[bytes], listener_keys: list[bytes], key: bytes
) -> None:
    opener, listener = pair(opener_keys, listener_keys)
    shake(opener, listener)
    assert opener.key_id == listener.key_id == key_id_of(key)


def test_a_key_that_is_removed_in_the_middle_admits_nobody() -> None:
    opener, listener = pair([OLD], [NEW, OLD])
    proof = opener.receive_reply(listener.receive_hello(opener.hello()))
    listener.ring.replace([NEW])
    with pytest.raises(AdmissionRefused, match="does not hold"):
        listener.receive_proof(proof)
    assert not listener.admitted


def test_who_is_not_on_the_list_is_refused_although_it_holds_the_key() -> None:
    for allowed in (AllowList(), AllowList([ALICE]), AllowList([EVE, ALICE])):
        shake(*pair(listener_allows=allowed))
    for allowed in (AllowList([]), AllowList([EVE])):
        opener, listener = pair(listener_allows=allowed)
        words = f"{format_peer_id(ALICE)} is not on the allow list of {format_peer_id(BOB)}"
        with pytest.raises(AdmissionRefused, match=words) as refusal:
            shake(opener, listener)
        assert refusal.value.code == Code.AUTHENTICATION_FAILED
        assert not listener.admitted
    with pytest.raises(AdmissionRefused, match=f"{format_peer_id(BOB)} is not on the allow list"):
        shake(*pair(opener_allows=AllowList([EVE])))


def test_the_list_is_told_only_to_those_who_hold_the_key() -> None:
    with pytest.raises(AdmissionRefused, match="different keys"):
        shake(*pair([OTHER], [NEW], listener_allows=AllowList([EVE])))


# --- the key ring ----------------------------------------------------------------------------


def test_a_key_file_is_read_with_comments_and_order() -> None:
    first, second = new_cluster_key(), new_cluster_key()
    assert first != second
    ring = parse_cluster_keys(f"# ring\n\n{first}  # new\n {second.upper()}\n", "ring.key")
    assert ring.keys == (bytes.fromhex(first), bytes.fromhex(second))
    assert ring.ids[0] == key_id_of(ring.keys[0])
    assert ring.ids == [key_id_of(key) for key in ring.keys]
    assert [ring.find(key_id) for key_id in ring.ids] == list(ring.keys)
    assert ring.find(key_id_of(OTHER)) is None
    assert not ring.keyless
    assert KeyRing().keyless


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("\nabcd\n", "line 2: not a cluster key"),
        ("zz" * 32, "line 1: not a cluster key"),
        (KEYLESS.hex(), "64 zeros"),
        (f"{NEW.hex()}\n{NEW.hex()}\n", "line 2: this key stands in the file twice"),
        ("\n".join(bytes([n] * 32).hex() for n in range(1, 18)), "at most 16"),
    ],
)
def test_a_malformed_key_file_is_refused_without_showing_keys(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_cluster_keys(text, "ring.key")
    assert "ring.key" in str(error.value)
    assert not any(line and line in str(error.value) for line in text.split("\n") if len(line) > 4)


# --- replacing a key ---------------------------------------------------------------------------


def test_in_every_step_any_two_peers_admit_each_other() -> None:
    """Wherever the files have got to: some peers have the next step already, the others do not."""
    steps = [f"# the ring\n{OLD.hex()}  # of last year\n"]
    steps.append(add_key(steps[-1], "f", NEW.hex()))
    steps.append(promote_key(steps[-1], "f"))
    steps.append(retire_keys(steps[-1], "f"))
    rings = [parse_cluster_keys(text, "f").keys for text in steps]
    assert rings == [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    for earlier, later in pairwise(rings):
        for one, other in ((earlier, later), (later, earlier), (later, later)):
            shake(*pair(one, other))
            # A ticket is made with the first key: the peer that checks it must hold that.
            assert one[0] in other
    assert all("# the ring\n" in text for text in steps)
    assert "# of last year" in steps[2]
    assert OLD.hex() not in steps[3]


def test_steps_that_make_no_sense_are_refused() -> None:
    one, full = OLD.hex(), "\n".join(bytes([n] * 32).hex() for n in range(1, MAX_KEYS + 1))
    for step, text, complaint in (
        (promote_key, one, "--add f"),
        (retire_keys, one, "none to retire"),
        (promote_key, "nonsense", "line 1"),
        (retire_keys, "", "holds no key"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            step(text, "f")
    for text, key, complaint in (
        (one, OLD.hex(), "twice"),
        (full, bytes([99] * 32).hex(), "at most 16"),
        ("x", NEW.hex(), "1"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            add_key(text, "f", key)


# --- the allow list --------------------------------------------------------------------------


def test_an_allow_file_is_read_with_comments() -> None:
    ids = [format_peer_id(each) for each in (ALICE, BOB)]
    text = f"# machines\n\n{ids[0]}  # the first\n  {ids[1]}\n"
    assert parse_peer_ids(text, "allow") == [ALICE, BOB]


@given(st.binary(min_size=32, max_size=32))
def test_every_peer_id_is_read_as_it_is_shown(seed: bytes) -> None:
    peer_id = Identity(seed).peer_id
    assert parse_peer_id(format_peer_id(peer_id), "allow") == peer_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "12D3KooW",
        format_peer_id(ALICE)[:-1],
        format_peer_id(ALICE) + "1",
        format_peer_id(ALICE)[:-1] + "0",
        format_peer_id(ALICE)[:-1] + "l",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "1" * 10_000,
    ],
)
def test_what_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allow: .*not a peer id"):
        parse_peer_id(text, "allow")


# --- what strangers are told, and roles ---------------------------------------------------------


def test_before_its_proof_the_other_side_learns_no_names() -> None:
    """Neither from messages nor from refusals, and not by guessing names without a key."""
    opener, listener = pair()
    hello = opener.hello()
    reply = listener.receive_hello(hello)
    assert (hello.software, reply.software) == ("", "")
    for keys, code in (([NEW], Code.WRONG_CLUSTER), ([OLD], Code.AUTHENTICATION_FAILED)):
        opener, listener = pair(keys, listener_cluster="the-secret-name")
        with pytest.raises(AdmissionRefused, match=r"prod|different keys") as refused:
            listener.receive_hello(opener.hello())
        assert refused.value.code == code
        assert "the-secret-name" not in refused.value.told
        assert "prod" in str(opener.explained(refused.value)) or code is not Code.WRONG_CLUSTER


def test_the_opener_adds_what_only_it_knows() -> None:
    opener, _ = pair()
    told = AdmissionRefused(Code.WRONG_CLUSTER, "the other side says: another")
    assert "this peer is of cluster 'prod': check --cluster" in str(opener.explained(told))
    opener.ring.replace([NEW], of_user=True)
    told = AdmissionRefused(Code.AUTHENTICATION_FAILED, "the other side says: wrong cluster key")
    said = str(opener.explained(told))
    assert "of another user" in said
    assert "keygen" in said


def readers_ring(*keys: bytes) -> KeyRing:
    text = reader_keys(KeyRing(keys), lambda seed: format_peer_id(Identity(seed).peer_id))
    return parse_cluster_keys(text, "reader.key")


def test_a_member_admits_a_reader_which_sees_that_it_is_a_member() -> None:
    opener, listener = pair()
    opener.ring = readers_ring(NEW)
    shake(opener, listener)
    assert listener.their_role is Role.READER
    assert opener.admitted


def test_members_are_members_to_each_other_also_while_readers_keys_are_shared() -> None:
    opener, listener = pair([NEW, OLD], [OLD, NEW])
    shake(opener, listener)
    assert listener.their_role is opener.their_role is Role.MEMBER


def test_a_reader_takes_no_reader_for_a_member() -> None:
    """The liar holds the readers' key, and answers as if it were a member's."""
    opener, listener = pair()
    opener.ring = readers_ring(NEW)
    listener.ring = KeyRing(opener.ring.keys)
    with pytest.raises(AdmissionRefused, match="does not prove that it is a member"):
        shake(opener, listener)
    assert not opener.admitted


def test_what_a_member_signed_for_one_reader_convinces_no_other() -> None:
    opener, listener = pair()
    opener.ring = readers_ring(NEW)
    reply = listener.receive_hello(opener.hello())
    welcome = listener.receive_proof(opener.receive_reply(reply))
    other, liar = pair(opener_sees=EVE)
    other.ring, liar.ring, liar.own_id = readers_ring(NEW), KeyRing(opener.ring.keys), EVE
    other.receive_reply(liar.receive_hello(other.hello()))
    with pytest.raises(AdmissionRefused, match="does not prove that it is a member"):
        other.receive_welcome(welcome)


def test_a_member_that_calls_does_not_take_a_reader_for_the_listener() -> None:
    """It lists no reader's key, but accepts one of those who call it."""
    opener, listener = pair()
    reader = readers_ring(NEW)
    listener.ring = KeyRing(reader.keys)
    reply = listener.receive_hello(msgspec.structs.replace(opener.hello(), key_ids=reader.ids))
    with pytest.raises(AdmissionRefused, match="a reader answers where a member was called"):
        opener.receive_reply(reply)


def test_a_readers_key_goes_with_the_members_key_it_was_made_from() -> None:
    reader = readers_ring(OLD, NEW)
    assert [*map(len, (reader.keys, reader.signers))] == [2, 2]
    assert reader.role is Role.READER
    for keys, accepted in (([OLD], 1), ([NEW, OLD], 2), ([OTHER], 0)):
        ring = KeyRing(keys)
        assert sum(ring.find(key_id) is not None for key_id in reader.ids) == accepted
        assert all(ring.role_of(key_id) is Role.READER for key_id in reader.ids)
        assert not any(reader.find(key_id) for key_id in ring.ids)
    for ring in (KeyRing(), KeyRing([NEW], of_user=True), reader):
        derived = KeyRing([reader_key_of(ring.keys[0])])
        assert ring.find(derived.ids[0]) is None, "only a cluster's own keys have readers'"


def test_a_file_of_two_roles_is_refused() -> None:
    text = reader_keys(KeyRing([NEW]), lambda seed: format_peer_id(Identity(seed).peer_id))
    with pytest.raises(ConfigError, match="keys of members and of readers"):
        parse_cluster_keys(text + OLD.hex() + "\n", "key")
    with pytest.raises(ConfigError, match="is not a peer id"):
        parse_cluster_keys(f"reader {NEW.hex()} 12D3Koo\n", "key")
    with pytest.raises(ConfigError, match="makes no other keys"):
        reader_keys(parse_cluster_keys(text, "key"), lambda seed: "")
