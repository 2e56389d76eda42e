"""Proofs of who wrote a version hold for it and nothing else; without one a holder adopts its copy after a while."""

from random import Random
from typing import Final

import pytest

from p2pstore.core.copies.proofs import (
    DOUBT_SECONDS,
    MAX_LEAVES,
    MAX_PROOF_BYTES,
    read_proof,
    sign_versions,
)
from p2pstore.core.operation import AskPeer
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.records import LocationRecord, writer_of
from p2pstore.home_messages import Push
from p2pstore.objects import Version
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Proofs
from tests.present import present
from tests.unit.core_harness import OTHER_INCARNATION, Harness, clock_at, digest_of, remote_object

WRITER = Identity(bytes(range(32)))
OTHER = Identity(bytes(32))


def holds(proof: bytes, digest: bytes, version: Version) -> bool:
    claim = read_proof(proof, digest, version)
    return claim is not None and Ed25519Verifier().verify(*claim)


def versions(count: int, seed: int = 1) -> list[tuple[bytes, Version]]:
    rng = Random(seed)
    return [
        (rng.randbytes(16), Version(rng.getrandbits(64), writer_of(WRITER.peer_id), rng.getrandbits(64)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33, 63, MAX_LEAVES])
def test_each_version_is_proved_and_no_other(count: int) -> None:
    signed = versions(count)
    proofs = sign_versions(signed, WRITER)
    assert len(proofs) == count
    for place, ((digest, version), proof) in enumerate(zip(signed, proofs, strict=True)):
        assert len(proof) <= MAX_PROOF_BYTES
        assert holds(proof, digest, version)
        clock, writer, root = version
        assert not holds(proof, digest, Version(clock, writer, root ^ 1))
        assert not holds(proof, digest, Version(clock ^ 1, writer, root))
        assert not holds(proof, bytes(16), version)
        if count > 1:
            assert not holds(proof, *signed[place - 1])


def test_a_proof_is_good_whole_only() -> None:
    ((digest, version),) = versions(1)
    proof = sign_versions(versions(7), WRITER)[0]
    for length in range(len(proof)):
        assert not holds(proof[:length], digest, version)
    for place in range(len(proof)):
        broken = bytearray(proof)
        broken[place] ^= 1
        assert not holds(bytes(broken), digest, version)
    assert not holds(proof + bytes(16), digest, version)


def test_nobody_proves_what_another_wrote() -> None:
    signed = versions(4)
    for (digest, version), proof in zip(signed, sign_versions(signed, OTHER), strict=True):
        assert not holds(proof, digest, version)


LONG_SECONDS: Final = 3_600


def with_unproved_copy() -> Harness:
    """A peer with a copy that another one wrote, without a proof."""
    world = Harness()
    entry = world.stored("k", b"value")
    world.gossip.release(entry.digest, entry.version, world.now)
    foreign = Version(entry.version.clock, world.writer ^ 1, entry.version.root)
    world.segment.objects.renew_version(entry, foreign)
    world.core.proofs.lacks(entry.digest, world.now)
    return world


def tick_for(world: Harness, seconds: int) -> None:
    for _ in range(seconds):
        world.now += 1.0
        world.core.proofs.tick(world.now)


def test_a_copy_that_nobody_proves_is_adopted_with_its_old_stamp() -> None:
    world = with_unproved_copy()
    before = present(world.find("k"))
    clock, root = before.version.clock, before.version.root
    tick_for(world, 1)
    assert world.core.counters["copies_adopted"] == 0, "not at once"
    tick_for(world, LONG_SECONDS)
    entry = present(world.find("k"))
    assert world.core.counters["copies_adopted"] == 1
    assert entry.version == Version(clock, writer_of(world.core.peer_id), root)
    assert world.value("k") == b"value"
    announced = present(world.announced("k"))
    assert announced.version == entry.version


def test_what_is_gone_meanwhile_is_not_adopted() -> None:
    world = with_unproved_copy()
    entry = present(world.find("k"))
    world.core.objects.withdraw(entry, world.now)
    tick_for(world, LONG_SECONDS)
    assert world.core.counters["copies_adopted"] == 0
    assert world.gossip.directory.holders(digest_of("k")) == []


def test_who_did_not_answer_is_asked_again_for_what_is_newer() -> None:
    """One lost answer must not leave an older copy here for good."""
    world = Harness(others=2)
    world.stored("k", b"older")
    writer, holder = world.others
    thing = remote_object("k", b"newer", clock_at(5.0), writer_of(writer.peer_id))
    (proof,) = sign_versions([(thing.slot.digest, thing.version)], writer.signer)
    location = LocationRecord(thing.slot.digest, thing.version, 5, 1).encode()
    world.serve(holder, DataKind.PUSH, Push(OTHER_INCARNATION, [1], location))
    for reply in (None, Proofs([proof])):
        world.core.gossip_arrived(world.now)
        (ask,) = [
            effect
            for effect in world.core.take_effects()
            if isinstance(effect, AskPeer) and effect.kind == DataKind.PROVE
        ]
        assert ask.peer_id == holder.peer_id
        world.answer(ask, reply)
        world.core.gossip_arrived(world.now)
        assert (world.value("k") == b"older") is (reply is None)
        world.now += DOUBT_SECONDS
        world.core.proofs.tick(world.now)
