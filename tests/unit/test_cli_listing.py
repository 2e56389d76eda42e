"""Reports of `ls` and `locate` on peers and keys that they cannot see."""

from __future__ import annotations

import pytest

from mooncake_p2p.commands.stored_keys import how_cut_off
from p2pstore.results import PeerInfo


def members(*others: str) -> list[PeerInfo]:
    """This peer, and others that are given as name:status."""
    return [
        PeerInfo(name, name, status, 1, [], [], 0, 0, 0, name == "me", "1", 0.0)
        for name, _, status in (each.partition(":") for each in ("me:alive", *others))
    ]


@pytest.mark.parametrize(
    "others",
    [
        (),
        ("a:alive", "b:dead"),
        ("a:left", "b:left"),
        ("a:dead", "a:alive"),  # it came back as another member
    ],
)
def test_a_peer_that_reaches_half_of_the_others_says_nothing(others: tuple[str, ...]) -> None:
    assert how_cut_off(members(*others)) == ""


@pytest.mark.parametrize(
    ("others", "reached"),
    [
        (("a:dead",), "0 of 1"),
        (("a:suspect", "b:dead", "c:left"), "0 of 2"),
        (("a:alive", "b:dead", "c:dead"), "1 of 3"),
    ],
)
def test_a_peer_that_is_cut_off_says_so(others: tuple[str, ...], reached: str) -> None:
    assert f"this peer reaches {reached} other members" in how_cut_off(members(*others))


def test_who_was_named_as_silent_is_not_told_of_again() -> None:
    others = members("a:suspect", "b:alive", "c:dead")
    assert "reaches 1 of 3" in how_cut_off(others)
    assert how_cut_off(others, ["a"]) == ""
