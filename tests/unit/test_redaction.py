"""Secrets are taken out of what is shown to others, and little else."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.access.invite import Invite, format_invite
from p2pstore.access.keyring import new_cluster_key
from p2pstore.status.doctor.support_bundle import REMOVED, Redactor

SECRET = bytes(range(100, 132))


@given(st.binary(min_size=16, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_a_known_secret_is_gone_in_every_form(secret: bytes, before: str, after: str) -> None:
    redactor = Redactor([secret])
    forms = [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret).decode().rstrip("="),
        repr(secret)[2:-1],
    ]
    for form in forms:
        assert form not in redactor.clean(f"{before} {form} {after}")
        assert form not in redactor.clean(f"x{form}y")


@pytest.mark.parametrize(
    "secret",
    [
        new_cluster_key(),
        base64.b64encode(SECRET + b"\x11" * 8).decode(),
        format_invite(Invite("c", ("10.0.0.1:17946",), (SECRET,))),
        format_invite(Invite("c", ("10.0.0.1:17946",))),
    ],
)
def test_what_looks_like_a_secret_is_gone(secret: str) -> None:
    cleaned = Redactor().clean(f"--invite {secret}, and more")
    assert secret[12:] not in cleaned
    assert cleaned.endswith(", and more")


@pytest.mark.parametrize(
    "text", ["secret=abc", '"api_key": "abc def"', "PASSWORD: abc", "x_token='abc'"]
)
def test_what_is_called_a_secret_is_gone(text: str) -> None:
    cleaned = Redactor().clean(f"{{{text}, 1}}")
    assert "abc" not in cleaned
    assert REMOVED in cleaned
    assert cleaned.endswith(", 1}")


@pytest.mark.parametrize(
    "text",
    [
        "12D3KooWQhAj76cqPja9erPrCoNbD5NCmkUSjixLkBTLPAC1Qp8u at 127.0.0.1:24801",
        "/var/lib/mooncake-p2p/machines/a-machine-with-a-long-name-17/state/peer.log",
        "p2pstore.gossip.links.connection_limits_and_other_long_names_of_modules",
        "checkpoint llm@0123456789abcdef0123456789abcdef published",
        "2026-01-31T12:00:00.123Z WARNING peer: tickets are renewed",
        "the key 'prompt/17' was removed, its token count is 4096",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor([SECRET]).clean(text) == text


def test_too_short_a_secret_is_not_looked_for() -> None:
    assert Redactor([b"", b"short"]).clean("short") == "short"


@pytest.mark.parametrize("value", ["3.5.0", 7, None, "a b"])
def test_json_stays_json(value: object) -> None:
    cleaned = Redactor().clean(json.dumps({"secretstorage": value, "other": 1}, indent=1))
    assert json.loads(cleaned) == {"secretstorage": REMOVED, "other": 1}
