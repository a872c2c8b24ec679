"""Where requests come from: proxies are believed where they are listed, and nobody else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runspec.core.spec.schema import Verify
from verify.coordinator.addresses import UNKNOWN, networks, place_of

PROXIES = networks(["10.0.0.7", "10.1.0.0/24", "fd00::/8"])
FORGED = "6.6.6.6"


@pytest.mark.parametrize(
    ("remote", "place"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, UNKNOWN),
        ("", UNKNOWN),
        ("/run/socket", UNKNOWN),
    ],
)
def test_an_address_is_a_place_and_of_ipv6_a_whole_64(remote, place):
    assert place_of(remote, [], ()) == place


@pytest.mark.parametrize(
    ("remote", "forwarded", "place"),
    [
        # nobody is believed who is no proxy, whatever it says
        ("203.0.113.9", [FORGED], "203.0.113.9"),
        # a proxy is, of the last entry, which is its own; what stands before, anybody wrote
        ("10.0.0.7", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.7", [f"{FORGED}, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.7", [FORGED, "203.0.113.9"], "203.0.113.9"),
        # and one behind another, of either family, with ports or without
        ("10.0.0.7", [f"{FORGED}, 203.0.113.9:5555, 10.1.0.3, [fd00::2]:80"], "203.0.113.9"),
        ("fd00::1", ["2001:db8:1:2::1"], "2001:db8:1:2::/64"),
        # a proxy that says nothing, or no address, is asked for itself
        ("10.0.0.7", [], "10.0.0.7"),
        ("10.0.0.7", ["unknown"], "10.0.0.7"),
        ("10.0.0.7", [f"{FORGED},"], "10.0.0.7"),
        ("10.0.0.7", ["10.1.0.3"], "10.1.0.3"),
    ],
)
def test_a_listed_proxy_is_believed_of_whom_it_asks_for(remote, forwarded, place):
    assert place_of(remote, forwarded, PROXIES) == place


@given(st.text(max_size=60), st.lists(st.text(",.:[]%0123456789abcdef ", max_size=80), max_size=4))
def test_whatever_is_sent_is_some_place(remote, forwarded):
    assert 0 < len(place_of(remote, forwarded, PROXIES)) < 50
    assert len(place_of("10.0.0.7", forwarded, PROXIES)) < 50


def test_a_header_without_end_is_read_from_its_end_only_and_no_further_than_a_few_hops():
    assert place_of("10.0.0.7", [f"{FORGED}," * 5000 + "10.1.0.3," * 20 + "10.0.0.7"], PROXIES) in (
        "10.1.0.3",
        "10.0.0.7",
    )


@pytest.mark.parametrize("wrong", ["10.0.0.7/8", "10.0.0", "proxy.example.org", "fd00::/200", ""])
def test_a_range_that_is_none_is_refused_in_the_spec(wrong):
    Verify.model_validate({"proxies": ["10.0.0.0/8", "fd00::/8", "::1"]})
    with pytest.raises(ValidationError):
        Verify.model_validate({"proxies": [wrong]})
