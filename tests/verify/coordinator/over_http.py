"""What a worker and a validator do in turn, over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import httpx

from runspec.core.canonical import digest_bytes
from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, submission, verdict
from tests.waiting import HANG_S
from verify.client import CoordinatorClient, WorkItem
from verify.coordinator_http import ENVELOPE, sign_request
from verify.formats.lease import Lease, open_lease

T = TypeVar("T")


def polled(ask: Callable[[float], T | None]) -> T:
    """What there is to get; the answer after 30 s may be too soon on a busy machine."""
    while (found := ask(DEADLINE_S)) is None:
        pass
    return found


def granted(site: Site, client: CoordinatorClient) -> tuple[bytes, Lease]:
    data = polled(client.lease)
    return data, open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))


def request(site: Site, method: str, path: str, **options: Any) -> httpx.Response:
    """A request that nobody signed, unless its headers say so; the answer may take long."""
    return httpx.request(method, site.url + path, trust_env=False, timeout=HANG_S, **options)


def status(site: Site) -> dict[str, Any]:
    """Answer of `GET /v1/status`."""
    return request(site, "GET", "/v1/status").json()


def sample(
    site: Site, key: SigningKey, client: CoordinatorClient, *, note: int = 0
) -> tuple[str, Lease]:
    """One lease taken and answered; the submission's digest and the lease."""
    data, lease = granted(site, client)
    envelope, table = submission(data, lease, key, note=note)
    client.submit(envelope, table)
    return digest_bytes(table), lease


def claimed(validator: CoordinatorClient) -> WorkItem:
    """A submission that a validator is to judge."""
    return polled(validator.next_submission)


def check(site: Site, validator: CoordinatorClient, **findings: object) -> str:
    """One submission claimed, downloaded and judged; its digest."""
    item = claimed(validator)
    assert digest_bytes(validator.download(item.submission)) == item.submission
    lease = open_lease(item.lease, coordinators=validator.roles().coordinator)
    validator.verdict(*verdict(item.submission, lease, site.validator, **findings))  # type: ignore[arg-type]
    return item.submission


def post(
    site: Site,
    key: SigningKey,
    path: str,
    body: bytes,
    *,
    envelope: bytes | str = "",
    method: str = "POST",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> httpx.Response:
    """A signed request as a client of one's own would make it."""
    headers = {**headers, **sign_request(key, run=RUN, method=method, path=path, body=body)}
    if envelope:
        raw = base64.b64encode(envelope).decode() if isinstance(envelope, bytes) else envelope
        headers[ENVELOPE] = raw
    return request(site, method, path, content=body, headers=headers)
