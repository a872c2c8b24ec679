"""The join link of a run, as its own machine knows it."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from runspec.core.address import JoinLink
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.spec.schema import RunSpec
from runspec.local.endpoints import load_endpoints

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - what a spec may say, not what is bound here


def run_link(run_dir: Path, spec: RunSpec) -> JoinLink | None:
    """What volunteers are sent; None where the run has no endpoints or no root yet.

    A coordinator is named by the address of the proxy before it (`placement.url`), or where it
    listens on all addresses by this machine's host name.
    """
    try:
        endpoints = load_endpoints(run_dir)
        root = spec.identity.root_public_key
        if root is None:
            root = SigningKey.load(run_dir / "keys" / "root.key").public_hex
    except UserError:  # not there yet, or another user's
        return None
    if endpoints is None:
        return None
    url = endpoints.public.get("coordinator", endpoints.coordinator)
    parts = urlsplit(url)
    if parts.hostname in _EVERYWHERE:
        url = f"{parts.scheme}://{socket.gethostname()}:{parts.port}"
    return JoinLink(url, spec.name, root)
