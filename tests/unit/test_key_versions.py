"""Versions by digest, against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.gossip.floors import floor_set as key_versions
from p2pstore.gossip.floors.floor_set import KeyVersions
from p2pstore.objects import ZERO_VERSION, Version

SIMILAR = st.binary(min_size=16, max_size=16) | st.sampled_from(
    [bytes(16), bytes(15) + b"\1", b"\1" * 16, b"\1" + bytes(15), b"\1\0" * 8, b"\0\1" * 8]
)
"""Found within each other's entries as well."""
VERSIONS = st.builds(Version, st.sampled_from([0, 1, 2, 257, 1 << 63]), st.integers(0, 257), st.just(0))


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_versions, "PLACES", 2)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(SIMILAR, max_size=4), VERSIONS), max_size=30),
    st.lists(SIMILAR),
)
@settings(deadline=None)
def test_as_a_dictionary(changes: list[tuple[bool, list[bytes], Version]], asked: list[bytes]) -> None:
    versions, model = KeyVersions(), dict[bytes, Version]()
    for raises, digests, version in changes:
        if raises:
            versions.raise_all(digests, version)
            model |= {digest: max(version, model.get(digest, version)) for digest in digests}
        else:
            versions.drop_all(digests, version)
            model = {d: v for d, v in model.items() if v != version or d not in digests}
        for digest in [*model, *digests, *asked]:
            assert versions.get(digest) == model.get(digest, ZERO_VERSION)


def test_what_is_no_digest_has_no_version() -> None:
    versions, version = KeyVersions(), Version(5, 1)
    versions.raise_all([b"", bytes(15), bytes(16), bytes(17)], version)
    assert [versions.get(bytes(size)) for size in (0, 1, 15, 17)] == [ZERO_VERSION] * 4
    assert versions.get(bytes(16)) == version


@pytest.mark.parametrize("number", [-1, 1 << 16, 1 << 64, 1 << 70])
def test_a_version_that_no_object_has_comes_and_goes(number: int) -> None:
    versions = KeyVersions()
    for version in (Version(7, number), Version(number, 7)):
        versions.raise_all([bytes(16)], version)
        assert versions.get(bytes(16)) != ZERO_VERSION
        versions.drop_all([bytes(16)], version)
        assert versions.get(bytes(16)) is ZERO_VERSION
