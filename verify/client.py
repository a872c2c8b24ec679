"""The coordinator's HTTP API from the caller's side: for samplers and for validators.

Synchronous; one instance may be shared by threads (a heartbeat beside the work). Every request is
signed and every answer bounded (`verify.coordinator_http`), and here it is checked: the spec and
the leases are believed because the coordinator signed them and the pinned root key names the
coordinator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import atomic_file
from runspec.core.hashing import digest_bytes
from runspec.core.http_client import Answer
from runspec.core.invite import use_invite
from runspec.core.keys import SigningKey
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec
from verify.coordinator_http import (
    MAX_ANSWER_BYTES,
    CoordinatorHttp,
    RunFinished,
    SubmissionRefused,
)
from verify.formats.joining import (
    MAX_SIGNED_SPEC_BYTES,
    MAX_SITE_BYTES,
    Site,
    SiteFile,
    open_site,
    open_spec,
)
from verify.formats.lease import lease_digest, open_lease
from verify.formats.submission import largest_submission_bytes, open_submission
from verify.formats.verdict import open_verdict
from verify.timeouts import BACKLOG_S, COORDINATOR_S

__all__ = ["CoordinatorClient", "RunFinished", "SubmissionRefused", "WorkItem"]

T = TypeVar("T")
ROLES_REFRESH_S = 300.0


@dataclass(frozen=True)
class WorkItem:
    """A submission that a validator is to check."""

    submission: str
    """Digest of the table; `download` fetches them."""
    lease: bytes
    """The signed lease."""
    envelope: bytes
    """The signed submission envelope."""
    share: float
    """Share of the worker's submissions to recompute, by its reputation; in [0, 1]."""


class CoordinatorClient:
    """Talks to one coordinator in the name of one key.

    Args:
        url: like http://127.0.0.1:8000.
        key: the caller's; a validator's must be named in roles.json.
        run: the run's name.
        root_public_key: the pinned root key (hex).
        deadline_s: how long one call goes on trying while the coordinator cannot be reached,
            answers 429 or 5xx, or does not come to the end of its answer; then UserError.
    """

    def __init__(
        self,
        url: str,
        key: SigningKey,
        *,
        run: str,
        root_public_key: str,
        deadline_s: float = COORDINATOR_S,
    ) -> None:
        self._key, self._run, self._root_public_key = key, run, root_public_key
        self._http = CoordinatorHttp(url, key, run=run, deadline_s=deadline_s)
        self._roles: Roles | None = None
        self._roles_read = 0.0
        self._spec: RunSpec | None = None
        self._held = threading.Lock()
        self._leases: set[str] = set()
        """Digests of the leases that this process works on, so that no others come again."""
        self._claims: set[str] = set()
        """The same for submissions to judge."""

    def roles(self) -> Roles:
        """The run's roles, read again every few minutes."""
        if self._roles is None or time.monotonic() - self._roles_read > ROLES_REFRESH_S:
            data = self._http.call("GET", "/v1/roles", max_bytes=MAX_ROLES_BYTES).content
            open_them = partial(open_roles, root_public_key=self._root_public_key, run=self._run)
            self._roles = self._opened(data, open_them)
            self._roles_read = time.monotonic()
        return self._roles

    def spec(self) -> RunSpec:
        """The run's resolved spec, as the coordinator signed it."""
        if self._spec is None:
            data = self._http.call("GET", "/v1/spec", max_bytes=MAX_SIGNED_SPEC_BYTES).content
            place, signers = f"{self._http.url}/v1/spec", self.roles().coordinator
            spec = self._opened(data, partial(open_spec, coordinators=signers, place=place))
            if spec.name != self._run:
                raise UserError(
                    f"serves run {spec.name!r}, not {self._run!r}",
                    place=self._http.url,
                    remedy="check --coordinator and --run",
                )
            self._spec = spec
        return self._spec

    def register(self, pool: str, info: Mapping[str, Any], *, invite: str | None = None) -> None:
        """Makes the key known as a worker of a pool of the spec; doing it again is harmless.

        Args:
            pool: name of the pool.
            info: a few scalars about the worker (software versions, hardware) for people.
            invite: text of an invite, where the run takes only who has one; once is enough.
        """
        body: dict[str, Any] = {"pool": pool, "info": dict(info)}
        if invite is not None:
            try:
                body["invite"] = use_invite(invite, self._key.public_hex)
            except BadSignature as error:
                raise UserError(
                    str(error), place="invite", remedy="copy the whole link that you were sent"
                ) from error
        self._post("/v1/workers", body)

    def lease(self, wait_s: float) -> bytes | None:
        """A signed lease (checked), or None when there was no work within `wait_s` seconds.

        A worker may hold a few leases (`MAX_OPEN_LEASES`): it samples one while the last sequences
        of another end and the submission of a third travels. What a process held when it ended
        comes again to the next one: the same bytes, until they are
        answered or expire.

        Raises:
            RunFinished: the run needs no more rollouts.
        """
        with self._held:
            body = {"wait": wait_s, "holding": sorted(self._leases)}
        answer = self._post("/v1/leases", body, wait_s=wait_s)
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        signers = self.roles().coordinator
        lease = self._opened(answer.content, partial(open_lease, coordinators=signers))
        if lease.worker != self._key.public_hex or lease.run != self._run:
            raise self._http.not_believed(BadSignature("a lease for another worker or run"))
        with self._held:
            self._leases.add(lease_digest(answer.content))
        return answer.content

    def submit(self, envelope: bytes, table: bytes) -> None:
        """Hands in a submission: its signed envelope and its table.

        Sending the same bytes again is harmless. Where too much waits for a verdict, the
        coordinator says when to come again, and this waits.

        Raises:
            SubmissionRefused: the lease expired, or was answered with other bytes.
            RunFinished: the run needs no more rollouts.
        """
        lease = open_submission(envelope).lease
        try:
            self._http.call(
                *("POST", "/v1/submissions"), body=table, envelope=envelope, backlog_s=BACKLOG_S
            )
        except SubmissionRefused:
            self._forget(self._leases, lease)
            raise
        self._forget(self._leases, lease)

    def hold(self, lease: str) -> None:
        """This process answers a lease that one before it was granted: it does not come again.

        Args:
            lease: its digest.
        """
        with self._held:
            self._leases.add(lease)

    def release(self, *, but: Collection[str] = ()) -> int:
        """Gives back the open leases that this process holds and will not answer.

        Others may be leased their groups at once. A stranger that gives one back is new again, and
        gets trials only (`verify.coordinator.machine.filling`).

        Args:
            but: digests of those that will be answered all the same.

        Returns:
            How many they are.
        """
        with self._held:
            leases = sorted(self._leases - set(but))
        if leases:
            self._post("/v1/release", {"leases": leases})
        for lease in leases:
            self._forget(self._leases, lease)
        return len(leases)

    def site(self) -> Site:
        """Where weights are served, and the files of the data, as the coordinator signed it."""
        data = self._http.call("GET", "/v1/site", max_bytes=MAX_SITE_BYTES).content
        signers = self.roles().coordinator
        return self._opened(data, partial(open_site, coordinators=signers, run=self._run))

    def fetch_data(self, file: SiteFile, path: Path) -> None:
        """Fetches a file of the data, checked against its digest; a whole file or none.

        Raises:
            UserError: the disk is full, the file there is not the one that was listed, or it is
                there no more.
        """
        self._http.stream(
            f"/v1/data/{file.digest}",
            lambda pieces: _write_checked(path, pieces, file),
        )

    def heartbeat(self, state: Mapping[str, Any]) -> None:
        """Says that the caller lives, and what it has done since its process began.

        Args:
            state: scalars. Workers: `version` (loaded), `busy_s` (seconds spent sampling) and
                `tokens` (output tokens), both cumulative. Validators: `busy_s` and `checked`.
        """
        self._post("/v1/heartbeat", {"state": dict(state)})

    def next_submission(self, wait_s: float) -> WorkItem | None:
        """The next submission to check, or None when none came within `wait_s` seconds.

        It is this validator's until `verdict`, or until the coordinator's claim deadline. Several
        may be held at once; what a process that died had held is offered again.

        Raises:
            RunFinished: every batch is closed.
        """
        with self._held:
            body = {"wait": wait_s, "holding": sorted(self._claims)}
        answer = self._post("/v1/validator/next", body, wait_s=wait_s)
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        item = self._opened(answer.content, self._work_item)
        with self._held:
            self._claims.add(item.submission)
        return item

    def download(self, digest: str) -> bytes:
        """The table of a submission; their digest is checked, their contents are not."""
        data = self._http.call(
            "GET",
            f"/v1/submissions/{digest}",
            max_bytes=largest_submission_bytes(self.spec()),
        ).content
        if digest_bytes(data) != digest:
            raise self._http.not_believed(BadSignature(f"bytes that are not those of {digest}"))
        return data

    def verdict(self, envelope: bytes, table: bytes) -> None:
        """Hands in a verdict file: its signed envelope and its table.

        A second verdict on a submission is taken note of and changes nothing.
        """
        self._http.call("POST", "/v1/verdicts", body=table, envelope=envelope)
        own = open_verdict(envelope, validators=frozenset({self._key.public_hex}))
        self._forget(self._claims, own.submission)

    def release_claims(self, submissions: Sequence[str], fault: str = "") -> None:
        """Gives back submissions that this process claimed and comes to no verdict on.

        Args:
            submissions: their digests.
            fault: what went wrong, where it is to do with just these submissions: the coordinator
                counts a failed attempt. Empty where the validator itself is at fault.
        """
        self._post("/v1/validator/release", {"submissions": list(submissions), "fault": fault})
        for submission in submissions:
            self._forget(self._claims, submission)

    @property
    def claims(self) -> list[str]:
        """Digests of the submissions that this process has claimed and not answered."""
        with self._held:
            return sorted(self._claims)

    def _forget(self, held: set[str], digest: str) -> None:
        with self._held:
            held.discard(digest)

    def _work_item(self, data: bytes) -> WorkItem:
        answer = parse_object(data, max_bytes=MAX_ANSWER_BYTES)
        lease, envelope = (str(answer[name]).encode() for name in ("lease", "envelope"))
        open_lease(lease, coordinators=self.roles().coordinator)
        submitted, share = open_submission(envelope), answer["share"]
        if type(share) not in (int, float) or not 0.0 <= share <= 1.0:
            raise BadSignature(f"a share of {str(share)[:40]}")
        return WorkItem(submitted.digest, lease, envelope, float(share))

    def _opened(self, data: bytes, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of an answer; raise its errors as a `UserError`."""
        try:
            return read(data)
        except (MalformedJson, KeyError, BadSignature) as error:
            raise self._http.not_believed(error) from error

    def _post(self, path: str, body: Mapping[str, Any], *, wait_s: float = 0.0) -> Answer:
        return self._http.call("POST", path, body=canonical_json(dict(body)), wait_s=wait_s)


def _write_checked(path: Path, pieces: Iterable[bytes], file: SiteFile) -> None:
    """Writes a file under a temporary name, and renames it once it is the one that was listed."""
    hasher, written = blake3(), 0
    with atomic_file(path) as out:
        for piece in pieces:
            written += len(piece)
            if written > file.bytes:
                break
            hasher.update(piece)
            out.write(piece)
        if written != file.bytes or hasher.hexdigest() != file.digest:
            raise UserError(
                f"the coordinator sent other bytes than those of {file.digest[:16]}",
                place=str(path),
                remedy="the file changed after the coordinator started: start it again",
            )
