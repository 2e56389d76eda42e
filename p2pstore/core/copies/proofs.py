"""Proofs of who wrote a copy: made, kept and asked for. Pure.

A copy counts when its version, root included, is its writer's own word: the holder is the writer, or the writer's log
says the same, or the holder has a proof of the writer. A proof was asked for once, and is remembered here; it lies
beside the copy, in its trailer and on the SSD, and goes with it.

Each proof stands by itself. The writer signs the root of a Merkle tree whose leaves are up to 64 versions; a proof is

    public key 32 | signature 64 | u8 place of the leaf | u8 leaves | hashes up to the root, 16 bytes each

which is 98 bytes for a version alone, and at most 194. Of an odd number of nodes, the last one goes up as it is.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from p2pstore.core.operation import KnownCopy, Operation, Reply
from p2pstore.gossip.records import (
    Member,
    PeerId,
    Tier,
    peer_id_from_public_key,
    public_key_from_peer_id,
    writer_of,
    writer_of_member,
)
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import decode_trailer
from p2pstore.objects import Version, put_newest
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import MAX_PROVED, Proofs, Prove
from p2pstore.wire import Signer

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_REMEMBERED: Final = 16_384
"""Versions that were proved: some 4 MB."""
MAX_TREES: Final = 1_024
"""Signatures that were found good: another version of one costs no check of 100 us."""
MAX_UNSIGNED: Final = 1_024
"""Own versions that the next signature may be about, too."""
MAX_SIGNED: Final = 8_192
"""Own proofs that are kept; others are made again."""
MAX_DOUBTED: Final = 4_096
ASK_SECONDS: Final = 0.5
"""For an answer: a reader may wait for it."""
COLD_SECONDS: Final = 2.0
"""For one that lies on the holder's SSD."""
DOUBT_SECONDS: Final = 10.0
"""Time for which a member is not asked again: of the key that it did not prove, or of any after a lie or silence."""
MAX_LACKING: Final = 65_536
"""Copies that came without a proof."""
FIRST_PAUSE_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 2.0
"""After this pause an unproved copy is adopted that its writer no longer holds: otherwise no peer could read it."""
MAX_PAUSE_SECONDS: Final = 60.0
HOLDERS_ASKED: Final = 2
"""Of one version, at first."""
MAX_HOLDERS_ASKED: Final = 8


class VersionProofs:
    """See the module's docstring."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._proved: OrderedDict[tuple[bytes, Version], None] = OrderedDict()
        self._trees: OrderedDict[SignedTree, None] = OrderedDict()
        self._unsigned: dict[bytes, None] = {}
        self._signed: OrderedDict[bytes, tuple[Version, bytes]] = OrderedDict()
        self._doubted_until: OrderedDict[tuple[Member, bytes], float] = OrderedDict()
        """By member and key; of all keys where that is empty."""
        self._lacking: OrderedDict[bytes, float] = OrderedDict()
        """Copies here without a proof, and the pause after the next question, in seconds."""
        self._due: list[tuple[float, bytes]] = []
        """When to ask, a heap."""
        self._unanswered: OrderedDict[bytes, float] = OrderedDict()
        """Keys of which newer versions could not be asked for, and when they can be; the first is due first."""
        self._asking: set[bytes] = set()
        """Keys of which newer versions are to be proved."""
        self._told: set[Member] = set()
        """Members of which the log says that they contradict a writer."""

    def wrote(self, digests: Iterable[bytes]) -> None:
        """This peer wrote versions of keys: each is signed when the first copy of it, or of one near it, leaves."""
        unsigned, written = self._unsigned, dict.fromkeys(digests)
        for digest in unsigned.keys() & written.keys():
            del unsigned[digest]
        unsigned.update(written)
        if len(unsigned) > 2 * MAX_UNSIGNED:
            for digest in list(islice(unsigned, len(unsigned) - MAX_UNSIGNED)):
                del unsigned[digest]

    def of(self, entry: ObjectEntry, now: float) -> bytes:
        """The proof of what is here in memory; empty where there is none."""
        core = self._core
        trailer = decode_trailer(core.segment.table.trailer_bytes(entry))
        if trailer is None or trailer.proof or not core.is_own(entry.version):
            return b"" if trailer is None else trailer.proof
        known = self._signed.get(entry.digest)
        if known is None or known[0] != entry.version:
            self._sign(entry, now)
            known = self._signed[entry.digest]
        return known[1]

    def _sign(self, entry: ObjectEntry, now: float) -> None:
        """One signature for this one, and for those that were written last and have none."""
        versions = [(entry.digest, entry.version)]
        self._unsigned.pop(entry.digest, None)
        for digest in list(islice(reversed(self._unsigned), MAX_LEAVES - 1)):
            del self._unsigned[digest]
            other = self._core.objects.find(digest, now)
            if other is not None and self._core.is_own(other.version):
                versions.append((digest, other.version))
        proofs = signed_proofs(versions, self._core.peer_id, self.sign(versions))
        for (digest, version), proof in zip(versions, proofs, strict=True):
            put_newest(self._signed, digest, (version, proof), MAX_SIGNED)

    def sign(self, versions: Sequence[tuple[bytes, Version]]) -> bytes:
        """Signatures for these own versions, of which `signed_proofs` makes the proofs."""
        signatures = sign_trees(versions, self._core.signer)
        self._core.counters["version_signatures"] += len(signatures) // SIGNATURE_BYTES
        return signatures

    def knows(self, digest: bytes, version: Version) -> bool:
        """Whether a proof of this version was seen."""
        return (digest, version) in self._proved

    def accept(self, digest: bytes, version: Version, proof: bytes) -> bool:
        """Whether this proves the version; it is remembered then."""
        if self.knows(digest, version):
            return read_proof(proof, digest, version) is not None
        tree = read_proof(proof, digest, version)
        if tree is None:
            return False
        if tree not in self._trees:
            if not self._core.verifier.verify(*tree):
                return False
            put_newest(self._trees, tree, None, MAX_TREES)
        self.believe(digest, version)
        return True

    def believe(self, digest: bytes, version: Version) -> None:
        """Remember that this version was proved."""
        put_newest(self._proved, (digest, version), None, MAX_REMEMBERED)

    def contradicts(self, copy: KnownCopy) -> None:
        """A member announces other bytes under a version than its writer does."""
        self._core.counters["contradicting_copies"] += 1
        if copy.member not in self._told and len(self._told) < MAX_DOUBTED:
            self._told.add(copy.member)
            name = self._core.name_of(copy.peer_id)
            self._core.notes.add(
                "",
                f"peer {name} announces other bytes than the writer of a version does: it is not read there",
            )

    def may_ask(self, copy: KnownCopy, now: float, *, insist: bool = False) -> bool:
        """Whether to ask the holder for a proof: it did not fail to give one a moment ago. `insist`: ask even a holder
        that did not answer then, as no other peer is known to have the key."""
        until = self._doubted_until.get
        return copy.reachable and (
            until((copy.member, copy.record.digest), 0.0) <= now
            and (insist or until((copy.member, b""), 0.0) <= now)
        )

    def undenied(self, copies: Iterable[KnownCopy], now: float) -> list[KnownCopy]:
        """Those whose holders did not fail to prove them a moment ago: they may have them."""
        until = self._doubted_until.get
        return [copy for copy in copies if until((copy.member, copy.record.digest), 0.0) <= now]

    def lacks(self, digest: bytes, now: float) -> None:
        """A copy came without a proof: others who have it are asked for theirs, until one has come or it has gone."""
        if digest not in self._lacking and len(self._lacking) < MAX_LACKING:
            self._lacking[digest] = FIRST_PAUSE_SECONDS
            heapq.heappush(self._due, (now, digest))

    def look_later(self, digest: bytes, now: float) -> None:
        """No holder of the newer version answers: look again when they may be asked again. A lost answer must not leave
        an older copy here for good."""
        if len(self._unanswered) < MAX_DOUBTED:
            self._unanswered.setdefault(digest, now + DOUBT_SECONDS)

    @property
    def due_at(self) -> float:
        look_at = next(iter(self._unanswered.values()), math.inf)
        return min(look_at, self._due[0][0] if self._due else math.inf)

    def tick(self, now: float) -> None:
        """Ask for some proofs of copies that are here, holders of many at once."""
        while next(iter(self._unanswered.values()), math.inf) <= now:
            digest, _ = self._unanswered.popitem(last=False)
            self._core.gossip.directory.watched.touch(digest)
        wanted: list[KnownCopy] = []
        for _ in range(MAX_PROVED):
            if not self._due or self._due[0][0] > now:
                break
            _, digest = heapq.heappop(self._due)
            pause = self._lacking.pop(digest)
            entry = self._core.objects.find(digest, now)
            if entry is None or self._core.is_own(entry.version) or self.of(entry, now):
                continue
            same = [
                copy
                for copy in self._core.copies.known(digest, now)
                if not copy.local and copy.reachable and copy.record.version == entry.version
            ]
            vouched = any(writer_of_member(copy.member) == entry.version.writer for copy in same)
            if pause > PATIENCE_SECONDS and not vouched:
                self._core.objects.adopt(entry, now)
                continue
            self._lacking[digest] = min(2 * pause, MAX_PAUSE_SECONDS)
            heapq.heappush(self._due, (now + pause, digest))
            wanted += same
        if wanted:
            self._core.operations.start(ProveOperation(self._core, wanted), now)

    def begin_asking(self, digest: bytes) -> bool:
        """Mark the key as asked about. False when another operation already asks for proofs of its newer versions."""
        if digest in self._asking:
            return False
        self._asking.add(digest)
        return True

    def asked(self, digest: bytes) -> None:
        self._asking.discard(digest)

    def doubt(self, member: Member, digest: bytes, now: float) -> None:
        """The member did not prove what it has of a key, or, where that is empty, does not answer or lies."""
        put_newest(self._doubted_until, (member, digest), now + DOUBT_SECONDS, MAX_DOUBTED)


class ProveOperation(Operation):
    """Ask holders for proofs of copies that nothing else vouches for, and wait for `seconds`: beyond `ASK_SECONDS` only
    for keys without a proved copy, of more holders. The result is of how many keys one was proved."""

    def __init__(
        self, core: PeerCore, copies: Iterable[KnownCopy], *, seconds: float = ASK_SECONDS
    ) -> None:
        super().__init__(core)
        self._copies = list(copies)
        self._seconds = seconds
        self._proved: set[bytes] = set()

    def start(self, now: float) -> None:
        most = HOLDERS_ASKED if self._seconds <= ASK_SECONDS else MAX_HOLDERS_ASKED
        by_holder: dict[tuple[PeerId, bool], list[KnownCopy]] = {}
        asked: dict[tuple[bytes, Version], int] = {}
        for copy in self._copies:
            what = copy.record.digest, copy.record.version
            if asked.get(what, 0) < most:
                asked[what] = asked.get(what, 0) + 1
                is_cold = copy.record.tier is Tier.SSD
                by_holder.setdefault((copy.peer_id, is_cold), []).append(copy)
        for (peer_id, is_cold), copies in by_holder.items():
            for start in range(0, len(copies), MAX_PROVED):
                some = copies[start : start + MAX_PROVED]
                request = Prove(b"".join(copy.record.digest for copy in some))
                seconds = COLD_SECONDS if is_cold else self._seconds
                self.ask(some, peer_id, DataKind.PROVE, request, seconds)
        if not self.asked:
            self.finish(0, now)

    def answered(self, copies: list[KnownCopy], reply: Reply, now: float) -> None:
        proofs = self.core.proofs
        items = reply.items if isinstance(reply, Proofs) else []
        if len(items) != len(copies):
            for copy in copies:
                proofs.doubt(copy.member, b"", now)
                proofs.look_later(copy.record.digest, now)
            items = [b""] * len(copies) if isinstance(reply, Proofs) else []
        for copy, proof in zip(copies, items, strict=False):
            digest, version = copy.record.digest, copy.record.version
            if proofs.accept(digest, version, proof):
                self._proved.add(digest)
                self._keep(digest, version, proof, now)
                self.core.gossip.directory.watched.touch(digest)
            else:
                proofs.doubt(copy.member, digest, now)
        unanswered = {copy.record.digest for copies in self.asked.values() for copy in copies}
        if not unanswered or (self._seconds > ASK_SECONDS and unanswered <= self._proved):
            self.finish(len(self._proved), now)

    def finish(self, result: Any, now: float) -> None:
        for copy in self._copies:
            self.core.proofs.asked(copy.record.digest)
        super().finish(result, now)

    def _keep(self, digest: bytes, version: Version, proof: bytes, now: float) -> None:
        entry = self.core.objects.find(digest, now)
        if entry is not None and entry.version == version and not self.core.is_own(version):
            self.core.segment.objects.set_proof(entry, proof)


MAX_LEAVES: Final = 64
_HASH_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
_FIXED_BYTES: Final = 32 + SIGNATURE_BYTES + 2
MAX_PROOF_BYTES: Final = _FIXED_BYTES + 6 * _HASH_BYTES
_LEAF: Final = struct.Struct("<16sQHQ")
_LEAF_PERSON: Final = b"p2pstore.vleaf.1"
_NODE_PERSON: Final = b"p2pstore.vnode.1"
_CONTEXT: Final = b"p2pstore versions 1\0"


class SignedTree(NamedTuple):
    """The statement of a proof, if its signature is good: `signer` signed `message`."""

    signer: PeerId
    message: bytes
    signature: bytes


def sign_versions(versions: Sequence[tuple[bytes, Version]], signer: Signer) -> list[bytes]:
    """A proof for each version, by the digests of their keys."""
    return signed_proofs(versions, signer.peer_id, sign_trees(versions, signer))


def sign_trees(versions: Sequence[tuple[bytes, Version]], signer: Signer) -> bytes:
    """Signatures for versions, by the digests of their keys: 64 bytes for the tree of each 64."""
    trees = [(len(some), _levels(some)[-1][0]) for some in _trees_of(versions)]
    return b"".join(signer.sign(_message(count, root)) for count, root in trees)


def signed_proofs(
    versions: Sequence[tuple[bytes, Version]], signer: PeerId, signatures: bytes
) -> list[bytes]:
    """Proofs of all these versions, from the signatures of `sign_trees`. They are good if these are. Raises
    `ValueError` for another number of signatures."""
    trees = _trees_of(versions)
    if len(signatures) != SIGNATURE_BYTES * len(trees):
        raise ValueError(f"{len(signatures)} bytes of signatures for {len(versions)} versions")
    proofs: list[bytes] = []
    for number, some in enumerate(trees):
        signature = signatures[number * SIGNATURE_BYTES : (number + 1) * SIGNATURE_BYTES]
        proofs += _proofs(_levels(some), signer, signature)
    return proofs


def read_proof(proof: bytes, digest: bytes, version: Version) -> SignedTree | None:
    """The statement of a proof of this version, its signature unchecked; None when it is of another version."""
    if not _FIXED_BYTES <= len(proof) <= MAX_PROOF_BYTES:
        return None
    key, signature, place, count = proof[:32], proof[32:96], proof[96], proof[97]
    hashes = [proof[at : at + _HASH_BYTES] for at in range(_FIXED_BYTES, len(proof), _HASH_BYTES)]
    signer = peer_id_from_public_key(key)
    if place >= count or count > MAX_LEAVES or writer_of(signer) != version.writer:
        return None
    node, width, hashes = _leaf(digest, version), count, hashes[::-1]
    while width > 1:
        if place ^ 1 < width:
            if not hashes:
                return None
            other = hashes.pop()
            node = _node(other, node) if place & 1 else _node(node, other)
        place, width = place >> 1, (width + 1) >> 1
    if hashes:
        return None
    return SignedTree(signer, _message(count, node), signature)


def _trees_of(versions: Sequence[tuple[bytes, Version]]) -> list[Sequence[tuple[bytes, Version]]]:
    return [versions[at : at + MAX_LEAVES] for at in range(0, len(versions), MAX_LEAVES)]


def _levels(versions: Sequence[tuple[bytes, Version]]) -> list[list[bytes]]:
    """The tree's hashes, from the leaves up to the root."""
    levels = [[_leaf(digest, version) for digest, version in versions]]
    while len(levels[-1]) > 1:
        levels.append(_above(levels[-1]))
    return levels


def _proofs(levels: list[list[bytes]], signer: PeerId, signature: bytes) -> list[bytes]:
    count = len(levels[0])
    begin = public_key_from_peer_id(signer) + signature
    return [begin + bytes((place, count)) + b"".join(_path(levels, place)) for place in range(count)]


def _message(count: int, root: bytes) -> bytes:
    return _CONTEXT + bytes((count,)) + root


def _leaf(digest: bytes, version: Version) -> bytes:
    return hashlib.blake2b(
        _LEAF.pack(digest, *version), digest_size=_HASH_BYTES, person=_LEAF_PERSON
    ).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.blake2b(left + right, digest_size=_HASH_BYTES, person=_NODE_PERSON).digest()


def _above(nodes: list[bytes]) -> list[bytes]:
    pairs = zip(nodes[::2], nodes[1::2], strict=False)
    return [_node(left, right) for left, right in pairs] + nodes[len(nodes) & ~1 :]


def _path(levels: list[list[bytes]], place: int) -> list[bytes]:
    path = []
    for nodes in levels[:-1]:
        if place ^ 1 < len(nodes):
            path.append(nodes[place ^ 1])
        place >>= 1
    return path
