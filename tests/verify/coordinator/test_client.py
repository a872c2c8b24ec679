"""Whom a client believes, and what it says of a coordinator that is not there."""

from __future__ import annotations

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import (
    Site,
)


def test_the_client_believes_only_the_root_that_it_pins(site: Site):
    with site.serving():
        key = SigningKey.generate()
        wrong = site.client(key, root=key.public_hex)
        with pytest.raises(UserError, match="not to be believed"):
            wrong.spec()
        elsewhere = site.client(key, run="other")
        with pytest.raises(UserError, match="not to be believed"):
            elsewhere.spec()


def test_the_client_names_a_coordinator_that_cannot_be_reached(site: Site, free_port: int):
    site.url = f"http://127.0.0.1:{free_port}"
    client = site.client(SigningKey.generate(), deadline_s=0.1)

    with pytest.raises(UserError, match=f"coordinator http://127.0.0.1:{free_port}: cannot be"):
        client.spec()
