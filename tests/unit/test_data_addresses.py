"""Data addresses with and without TLS."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.addresses import split_address
from p2pstore.errors import ConfigError
from p2pstore.transfer.data_messages import DataAddress, over_tls, split_data_address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:17947", DataAddress("10.0.0.1", 17947)),
        ("tls://10.0.0.1:17947", DataAddress("10.0.0.1", 17947, tls=True)),
        ("tls://[fd00::1]:5", DataAddress("fd00::1", 5, tls=True)),
        ("tls:5", DataAddress("tls", 5)),  # a host of that name
    ],
)
def test_forms_of_addresses(address: str, expected: DataAddress) -> None:
    assert split_data_address(address) == expected


@pytest.mark.parametrize("address", ["quic://a:1", "tls://", "tls://a", "tls://tls://a:1", "TLS://a:1"])
def test_a_form_that_is_not_known(address: str) -> None:
    with pytest.raises(ConfigError, match="data address: "):
        split_data_address(address)


@pytest.mark.parametrize("address", ["10.0.0.1:17947", "node:5", "[fd00::1]:5"])
def test_readers_before_tls_take_the_new_form_for_no_address(address: str) -> None:
    """They pass over what this function refuses."""
    assert over_tls(address).startswith("tls://")  # as in golden bytes: others read it
    with pytest.raises(ConfigError):
        split_address(over_tls(address), "data address")


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    for address in (text, over_tls(text)):
        found, complaint = None, ""
        try:
            found = split_data_address(address)
        except ConfigError as error:
            complaint = str(error)
        assert complaint.startswith("data address: ") if found is None else found.host
