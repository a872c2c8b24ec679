"""Client of the coordinator's endpoints for learner islands.

Every call is synchronous, signed with the island's key, limited in size, and has a deadline:
`deadline_s` while the coordinator is away, added to the time that the coordinator may wait.
Threads may share a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from runspec.core.canonical import canonical_json, digest_bytes, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.http_client import Answer
from runspec.core.signed import BadSignature, SigningKey
from verify import COORDINATOR_S
from verify.coordinator_http import MAX_ANSWER_BYTES, CoordinatorHttp, SubmissionRefused
from verify.formats import batch
from verify.formats.verdict import MAX_BYTES as MAX_FILE_BYTES


class IslandRefused(UserError):
    """Raised if an island contradicts the others; it must stop.

    Its outer state, its data or the size of its share differs from another island's.
    """


@dataclass(frozen=True)
class Committed:
    """The record of a step, whose signature is checked."""

    record: batch.CommitRecord
    digest: str
    """Digest of the signed record; `previous` of the next one."""


@dataclass(frozen=True)
class Waiting:
    """A step that is not committed yet."""

    waiting_for: dict[str, str]
    """Islands whose shares are missing, and why."""
    offered: list[str]
    """Islands whose shares count."""


class IslandClient:
    """Calls one coordinator as one island.

    Args:
        url: URL such as http://127.0.0.1:8000.
        run: name of the run.
        key: key of the island, which roles.json names.
        root_public_key: the pinned root key (hex).
        deadline_s: seconds for which a call retries while the coordinator cannot be reached or
            answers 5xx; then it raises UserError.
    """

    def __init__(
        self,
        url: str,
        run: str,
        key: SigningKey,
        *,
        root_public_key: str,
        deadline_s: float = COORDINATOR_S,
    ) -> None:
        self._run, self._key = run, key
        self._http = CoordinatorHttp(
            url, key, run=run, root_public_key=root_public_key, deadline_s=deadline_s
        )

    def roles(self) -> bytes:
        """Return the run's roles.json, checked against the root key."""
        return self._http.roles_document()

    def announce(self, url: str, version: int, digest: str) -> None:
        """Say that this island's store has the outer state of a version, for islands that join."""
        body = canonical_json({"url": url, "version": version, "digest": digest})
        self._http.call("POST", "/v1/islands/outer", body=body)

    def outer_states(self) -> batch.OuterStates:
        """Return the newest outer state of each island that announced one, and how far the run
        is."""
        answer = self._get("/v1/islands/outer", 0.0, max_bytes=batch.MAX_RECORD_BYTES)
        return self._http.opened(answer.content, batch.read_outer, kind=batch.OUTER_STATES)

    def offer(self, offer: batch.ShareOffered) -> bool:
        """Sign an offer and send it; the same offer again changes nothing.

        Returns:
            False if the step is committed already: its record says who was dropped.

        Raises:
            IslandRefused: the offer contradicts another island's, or its step is not open.
        """
        try:
            body = batch.sign_offer(offer, self._key)
            self._http.call("POST", "/v1/islands/offer", body=body)
        except SubmissionRefused as error:
            if isinstance(self.record(offer.step, 0.0), Committed):
                return False
            raise _refused(error) from error
        return True

    def record(self, step: int, wait_s: float) -> Committed | Waiting:
        """Return the record of a step, or for whom it waits if there is none within `wait_s`.

        The coordinator waits at most 30 s.
        """
        answer = self._get(f"/v1/islands/records/{step}", wait_s, max_bytes=batch.MAX_RECORD_BYTES)
        data = answer.content
        if answer.status == HTTPStatus.ACCEPTED:
            return self._http.opened(data, _waiting)
        keys = self._http.roles().coordinator
        record = self._http.opened(
            data, batch.open_commit, coordinators=keys, run=self._run, step=step
        )
        return Committed(record, digest_bytes(data))

    def lost(self, step: int, island: str) -> bool:
        """Say that the share of an island cannot be fetched, though the step's record names it.

        Returns:
            Whether the step gets another record, without that share.
        """
        body = canonical_json({"step": step, "island": island})
        try:
            self._http.call("POST", "/v1/islands/lost", body=body)
        except SubmissionRefused:
            return False
        return True

    def result(self, step: int, record: str, digest: str, wait_s: float = 0.0) -> bool | None:
        """Report the digest of the outer state that follows from a step's record.

        Args:
            step: of the record.
            record: its digest.
            digest: digest of the outer state.
            wait_s: seconds to wait for the record to be final; at most 30.

        Returns:
            Whether the record is final; None if the step has another one by now, or none.

        Raises:
            IslandRefused: another island reported another digest.
        """
        body = canonical_json({"step": step, "record": record, "digest": digest})
        try:
            path = f"/v1/islands/result?wait={wait_s:g}"
            answer = self._http.call("POST", path, body=body, wait_s=wait_s)
        except SubmissionRefused as error:
            newest = self.record(step, 0.0)
            if not isinstance(newest, Committed) or newest.digest != record:
                return None
            raise _refused(error) from error
        found = self._http.opened(answer.content, parse_object, max_bytes=MAX_ANSWER_BYTES)
        return found.get("final") is True

    def result_of(self, step: int) -> str | None:
        """Return the digest that was reported for a step; None if none was."""
        answer = self._get(f"/v1/islands/results/{step}", 0.0, max_bytes=MAX_ANSWER_BYTES)
        found = self._http.opened(answer.content, parse_object, max_bytes=MAX_ANSWER_BYTES)
        digest: str | None = found.get("digest")
        if digest is not None and not is_digest(digest):
            raise self._http.not_believed(BadSignature("a result that is no digest"))
        return digest

    def batch(self, step: int, wait_s: float) -> bytes | None:
        """Return the signed manifest of a step; None if there is none within `wait_s`.

        The coordinator waits at most 30 s. The caller checks the signature.
        """
        answer = self._get(f"/v1/islands/batches/{step}", wait_s, max_bytes=batch.MAX_BYTES)
        return None if answer.status == HTTPStatus.NO_CONTENT else answer.content

    def file(self, step: int, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a file that the manifest of a step names; the caller checks its digest.

        Args:
            step: step of the manifest.
            name: name of the file in its folder, such as `<digest>.verdict.safetensors`.
            max_bytes: largest size of the file.

        Raises:
            UserError: the manifest names no such file, or a full checkpoint has passed it.
        """
        return self._get(f"/v1/islands/files/{step}/{name}", 0.0, max_bytes=max_bytes).content

    def _get(self, path: str, wait_s: float, *, max_bytes: int) -> Answer:
        query = f"?wait={wait_s:g}" if wait_s else ""
        return self._http.call("GET", path + query, wait_s=wait_s, max_bytes=max_bytes)


def _waiting(data: bytes) -> Waiting:
    """Read the answer of a step that is not committed.

    Raises:
        MalformedJson, BadSignature: it has another form.
    """
    answer: dict[str, Any] = parse_object(data, max_bytes=batch.MAX_RECORD_BYTES)
    missing, offered = answer.get("waiting_for"), answer.get("offered")
    if not isinstance(missing, dict) or not isinstance(offered, list):
        raise BadSignature("no record, and nobody to wait for")
    texts = {str(name): str(why) for name, why in missing.items()}
    return Waiting(texts, [str(name) for name in offered])


def _refused(error: UserError) -> IslandRefused:
    remedy = "all islands need the same spec, data and version of this program: compare their logs"
    return IslandRefused(error.thing, place=error.place, remedy=remedy)
