"""Copies of run files, brought by HTTP into the folder of an island without the run directory.

    FOLDER/keys/roles.json                  the keys of the run, from the coordinator
    FOLDER/initial/                         a model of the run's shape, from the broadcast tree
    FOLDER/rollouts/step_<s>/batch.json     the signed manifest of step s, from the coordinator
    FOLDER/rollouts/step_<s>/...            the rollouts of the island's own groups, likewise

The paths are those of a run directory, so its readers read the folder (`learner_jax.feed`,
`learner_jax.batch`). Every file is checked before it appears, and appears by one rename: what is
there is not fetched again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from broadcast.client import WeightsClient
from learner_jax import feed
from learner_jax.distributed import IslandLink, LearnerRun
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles
from runspec.core.run_files import initial_model, step_folder, submission_files
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.signed import BadSignature, SigningKey
from verify.formats import batch as batch_format
from verify.formats import submission as submission_format
from verify.formats import verdict as verdict_format
from verify.formats.batch import BatchGroup, BatchManifest
from verify.formats.submission import largest_submission_bytes, open_submission
from verify.formats.verdict import open_verdict
from verify.island_client import IslandClient

WAIT_S = 5.0
"""Seconds of one request for a manifest; a stop takes effect after it."""
REPORT_EVERY_S = 30.0
_POLL_S = 0.1
_AT_ONCE = 8
"""Submissions that are fetched at a time."""
INITIAL_S = 3600.0
"""Seconds that a first version may take to be published, and as many to arrive."""
_LOG = logging.getLogger(__name__)
Check = Callable[[bytes, Roles], object]
"""Raises a BadSignature if bytes are not to be believed, given the run's roles."""


class Mirror:
    """Brings the coordinator's files; it begins with the run's roles.

    Args:
        folder: the island's own.
        spec: the run's resolved spec.
        coordinator: answers the requests; each of its calls has a deadline.
        root_public_key: pinned; signs roles.json.

    Raises:
        UserError: the coordinator does not answer, or its roles.json is not to be believed.
    """

    def __init__(
        self, folder: Path, spec: RunSpec, coordinator: IslandClient, root_public_key: str
    ) -> None:
        self._folder, self._spec = folder, spec
        self._coordinator, self._root_public_key = coordinator, root_public_key
        self._roles = self.bring_roles()

    def bring_roles(self) -> Roles:
        """Write the newest roles.json and return it; one issued earlier than ours is ignored.

        Raises:
            UserError: the coordinator does not answer, or its roles.json is not to be believed.
        """
        path, data = self._folder / "keys" / "roles.json", self._coordinator.roles()
        opened = partial(open_roles, root_public_key=self._root_public_key, run=self._spec.name)
        try:
            found = opened(data)
        except BadSignature as error:
            raise self._not_believed("roles.json", error) from error
        try:
            held = opened(read_bounded(path, MAX_ROLES_BYTES))
        except (FileNotFoundError, BadSignature, UserError):
            held = None
        if held is None or held.issued < found.issued:
            write_atomic(path, data)
            held = found
        self._roles = held
        return held

    def bring_manifest(self, step: int, stop: feed.StopSignal) -> bool:
        """Wait until the manifest of a step is here; return False if `stop` was set meanwhile.

        It waits as long as the coordinator does, which may wait for workers without end.

        Raises:
            UserError: the coordinator does not answer, or its manifest is not to be believed.
        """
        path = step_folder(self._folder, step) / batch_format.FILE_NAME

        def check(data: bytes, roles: Roles) -> None:
            feed.open_manifest(data, spec=self._spec, step=step, coordinators=roles.coordinator)

        begun = time.monotonic()
        report_at = begun + REPORT_EVERY_S
        while not self._holds(path, batch_format.MAX_BYTES, check):
            if stop.is_set():
                return False
            data = self._coordinator.batch(step, WAIT_S)
            if data is not None:
                self._write(path, f"the manifest of step {step}", data, check)
                return True
            now = time.monotonic()
            if now > report_at:
                _LOG.info("step %d: %.0f s waiting for the coordinator's batch", step, now - begun)
                report_at = now + REPORT_EVERY_S
            time.sleep(_POLL_S)  # a server that does not wait itself is not asked without end
        return True

    def bring_rollouts(self, step: int, groups: Iterable[BatchGroup]) -> None:
        """Bring the submissions and verdicts of some groups.

        Args:
            step: step of the manifest that names them.
            groups: those that the island trains on.

        Raises:
            UserError: the coordinator does not answer or has a file no more, or one is not what
                the manifest names.
        """
        named = {(group.submission, group.verdict): group for group in groups}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rollouts") as threads:
            bringing = [threads.submit(self._bring, step, group) for group in named.values()]
            try:
                for each in bringing:
                    each.result()
            finally:
                threads.shutdown(cancel_futures=True)

    def _bring(self, step: int, group: BatchGroup) -> None:
        """Bring the four files of one submission, each unless it is there."""
        files = submission_files(self._folder, group.step, group.submission)
        largest = max(verdict_format.MAX_BYTES, largest_submission_bytes(self._spec))

        def of_envelope(data: bytes, roles: Roles) -> str:
            return open_verdict(data, validators=roles.validator).digest

        for path, max_bytes, digest, named in (
            (files.submission, largest, lambda data, _: digest_bytes(data), group.submission),
            (files.verdict, largest, lambda data, _: digest_bytes(data), group.verdict),
            (
                *(files.submission_envelope, submission_format.MAX_ENVELOPE_BYTES),
                *(lambda data, _: open_submission(data).digest, group.submission),
            ),
            (
                *(files.verdict_envelope, verdict_format.MAX_ENVELOPE_BYTES),
                *(of_envelope, group.verdict),
            ),
        ):
            check = partial(_check_digest, digest, named)
            if not self._holds(path, max_bytes, check):
                data = self._coordinator.file(step, path.name, max_bytes=max_bytes)
                self._write(path, f"{path.name} of step {step}", data, check)

    def _holds(self, path: Path, max_bytes: int, check: Check) -> bool:
        """Return whether a file is here and right; after a rollback of the run it may be neither
        signed by today's keys nor of today's step."""
        try:
            check(read_bounded(path, max_bytes), self._roles)
        except FileNotFoundError:
            return False
        except BadSignature as error:
            _LOG.info("%s: brought anew: %s", path, error)
            return False
        return True

    def _write(self, path: Path, what: str, data: bytes, check: Check) -> None:
        """Check bytes by the known roles, or else by the newest, which may name more keys; write.

        Raises:
            UserError: the check failed twice.
        """
        try:
            check(data, self._roles)
        except BadSignature:
            try:
                check(data, self.bring_roles())
            except BadSignature as error:
                raise self._not_believed(what, error) from error
        write_atomic(path, data)

    def _not_believed(self, what: str, error: BadSignature) -> UserError:
        return UserError(
            f"{what} of the coordinator is not to be believed: {error}",
            remedy="check the coordinator's URL and the pinned root key, and see its log",
        )


def _check_digest(
    digest: Callable[[bytes, Roles], str], named: str, data: bytes, roles: Roles
) -> None:
    """Compare what `digest` finds, which checks the data too, with what a manifest names."""
    if (found := digest(data, roles)) != named:
        raise BadSignature(f"of digest {found[:16]}, the manifest says {named[:16]}")


def fetch_initial(
    folder: Path,
    urls: Sequence[str],
    *,
    run: str,
    root_public_key: str,
    compared: bool,
    deadline_s: float,
) -> Path:
    """Fetch the starting model, unless it is there; a fetch that was killed goes on.

    An island takes its parameters from the others' outer state, and from the starting model only
    shape and tokenizer. Any version has these, and version 0 may be served no more.

    Args:
        folder: the island's own.
        urls: relays or origins of the run's versions.
        run: name of the run.
        root_public_key: pinned; signs the roles.json that names the publisher.
        compared: whether the starting model is the reference policy, so that it must be version 0.
        deadline_s: seconds that it may take.

    Returns:
        FOLDER/initial: a Hugging Face directory, in `broadcast.dtype`.

    Raises:
        UserError: not fetched in time; the message names each server and its fault.
    """
    final, cache = initial_model(folder), folder / "work" / "initial"
    if not final.exists():
        with WeightsClient(
            urls, run=run, root_public_key=root_public_key, cache_dir=cache
        ) as client:
            newest = None if compared else client.latest(None, deadline_s)
            version = 0 if newest is None else newest.version
            client.fetch(version, manifest_digest=None, deadline_s=deadline_s).rename(final)
    shutil.rmtree(cache, ignore_errors=True)
    return final


def prepare_folder(folder: Path, link: IslandLink, log: logging.Logger) -> None:
    """Bring roles and starting model, where the island is not the trunk's.

    Args:
        folder: the island's own, with the run's spec.json.
        link: of the island.
        log: told of it.

    Raises:
        UserError: the coordinator or the servers of the weights do not answer in time.
    """
    if not link.weights:
        return
    key, root = SigningKey.load(link.key), link.root_public_key
    assert root is not None, "an island without the run directory is told the root key"
    spec = load_resolved(folder)
    Mirror(folder, spec, IslandClient(link.coordinator, spec.name, key, root_public_key=root), root)
    log.info("island %s: waiting for a version of the model", link.name)
    compared = spec.supervised is None and spec.grpo.kl.coef > 0
    fetch_initial(
        *(folder, link.weights),
        run=spec.name,
        root_public_key=root,
        compared=compared,
        deadline_s=INITIAL_S,
    )


class MirroredReader:
    """A reader of batches whose files the coordinator sends.

    While a step is trained, the manifest of the next one is brought.

    Args:
        run: of an island without the run directory.
        reader: reads the files, once they are here.
    """

    def __init__(self, run: LearnerRun, reader: feed.Reader) -> None:
        link = run.link
        assert link is not None, "an island"
        key, root = SigningKey.load(link.key), run.root_public_key()
        client = IslandClient(link.coordinator, run.spec.name, key, root_public_key=root)
        self._mirror = Mirror(run.folder, run.spec, client, root)
        self._reader, self._island, self._steps = reader, link.name, run.spec.steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manifest")

    def wait(self, step: int, stop: feed.StopSignal, log: logging.Logger) -> Any | None:
        """Wait for the manifest of a step, and bring the rollouts of the island's share.

        Raises:
            UserError: the coordinator does not answer, or a file is not what the manifest names.
        """
        bringing = self._thread.submit(self._mirror.bring_manifest, step, stop)
        while not bringing.done():
            if stop.wait(feed.POLL_S):
                return None
        if not bringing.result():
            return None
        if step + 1 < self._steps:
            self._thread.submit(self._mirror.bring_manifest, step + 1, stop)
        manifest = self._reader.wait(step, stop, log)
        if isinstance(manifest, BatchManifest):
            groups = manifest.groups[feed.own_share(manifest, self._island)]
            self._mirror.bring_rollouts(step, groups)
        return manifest

    def read(self, manifest: Any) -> Any:
        return self._reader.read(manifest)
