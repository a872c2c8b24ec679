"""Addresses to listen on, as command lines say them."""

import pytest

from runspec.core.address import parse_address
from runspec.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("::1:80", ("::1", 80)),
    ],
)
def test_an_address_is_host_and_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "8080", ":8080", "host:", "host:x", "host:-1", "host:65536"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"127\.0\.0\.1:8080"):
        parse_address(text)
