"""Invites: what one says comes out of the line again, and whatever else is pasted is told what it is."""

import base64

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.access.invite import MAX_ADDRESSES, PREFIX, Invite, format_invite, parse_invite
from p2pstore.access.keyring import KEYLESS, MAX_KEYS, parse_cluster_keys
from p2pstore.errors import ConfigError
from p2pstore.wire import encode_body

INVITE = Invite("blue", ("10.0.0.1:17946", "[fd00::1]:5"), (bytes(range(32)), b"\xff" * 32))
LINE = (
    "p2pstore1:k6RibHVlkq4xMC4wLjAuMToxNzk0NqtbZmQwMDo6MV06NZLEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZG"
    "hscHR4fxCD__________________________________________3RcPzDYF0jc"
)


def packed(body: bytes) -> str:
    data = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    return PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_golden() -> None:
    assert format_invite(INVITE) == LINE
    assert parse_invite(LINE) == INVITE


def test_keys_become_a_key_file() -> None:
    assert parse_cluster_keys(INVITE.key_file(), "file").keys == INVITE.keys


def test_a_key_is_never_shown() -> None:
    assert "2 keys" in repr(INVITE)
    assert "\\xff" not in repr(INVITE)


def test_a_line_that_a_terminal_wrapped() -> None:
    wrapped = f"  {LINE[:80]}\n  {LINE[80:]}\r\n"
    assert parse_invite(wrapped) == INVITE


def test_fields_of_a_later_version_are_passed_over() -> None:
    class Later(Invite, frozen=True):
        more: str = ""

    later = Later(INVITE.cluster, INVITE.bootstrap, INVITE.keys, "more")
    assert parse_invite(packed(encode_body(later))) == INVITE


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "that is no invite"),
        ("hello: world", "that is no invite"),
        (LINE.removeprefix("p2p"), "that is no invite"),
        (LINE.replace("p2pstore1:", "p2pstore2:"), "format p2pstore2.*upgrade this machine"),
        (LINE[:-1], "torn or mistyped"),
        (LINE[:-20], "torn or mistyped"),
        (LINE[:30] + "A" + LINE[31:], "torn or mistyped"),
        (LINE + "!", "torn or mistyped"),
        (PREFIX, "torn or mistyped"),
        (PREFIX + "A" * 9000, "too long"),
        (" " * 20000, "too long"),
        (packed(b"\x93\x01\x02\x03"), "holds something else"),
        (packed(encode_body(Invite("", ("a:1",)))), "cluster name"),
        (packed(encode_body(Invite("c", ()))), "0 addresses"),
        (packed(encode_body(Invite("c", ("a:1",) * (MAX_ADDRESSES + 1)))), "17 addresses"),
        (packed(encode_body(Invite("c", ("a:0",)))), "a:0 has port 0"),
        (packed(encode_body(Invite("c", ("0.0.0.0:1",)))), "no address that one can connect to"),
        (packed(encode_body(Invite("c", ("a" * 400 + ":1",)))), "an address of 402 characters"),
        (packed(encode_body(Invite("c", ("a:1",), (b"short",)))), "no cluster key"),
        (packed(encode_body(Invite("c", ("a:1",), (KEYLESS,)))), "no cluster key"),
        (packed(encode_body(Invite("c", ("a:1",), (b"1" * 32,) * 2))), "no cluster key"),
        (
            packed(encode_body(Invite("c", ("a:1",), tuple(bytes([n]) * 32 for n in range(1, 18))))),
            f"17 keys; at most {MAX_KEYS}",
        ),
    ],
)
def test_other_text_is_refused_with_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_invite(text)
    assert len(str(caught.value)) < 250


@given(st.text(max_size=60) | st.binary(max_size=60).map(packed))
def test_any_text_is_an_invite_or_a_clear_error(text: str) -> None:
    for attempt in (text, PREFIX + text):
        try:
            format_invite(parse_invite(attempt))
        except ConfigError:
            continue


@given(
    st.text(min_size=1, max_size=20),
    st.lists(st.integers(1, 65535), min_size=1, max_size=4, unique=True),
    st.lists(st.binary(min_size=32, max_size=32), max_size=3, unique=True),
)
def test_an_invite_survives_writing_and_reading(
    cluster: str, ports: list[int], keys: list[bytes]
) -> None:
    try:
        invite = Invite(cluster, tuple(f"host:{port}" for port in ports), tuple(keys))
        line = format_invite(invite)
    except ConfigError:
        return  # not a cluster's name
    assert parse_invite(line) == invite
