"""The published full states of a run (`bridge.states`), as a stranger fetches and replays them."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tarfile import TarFile, TarInfo
from tempfile import TemporaryDirectory, TemporaryFile

from bridge.states import HISTORY_FILE, MAX_HISTORY_BYTES
from broadcast.client import WeightsClient
from broadcast.layout import latest_name, roles_name, states_run
from runspec.core.address import JoinLink, reachable
from runspec.core.canonical import MalformedJson
from runspec.core.errors import UserError, reported
from runspec.core.files import read_bounded, read_object, write_atomic
from runspec.core.http_client import NoAnswer, fetch_now
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Latest, open_latest, open_roles
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.schema.load import dump_resolved, parse_resolved
from runspec.core.schema.source_files import redirected
from runspec.core.signed import BadSignature, SigningKey
from verify import PERSON_S
from verify.audit.replay import choose, replay
from verify.client import CoordinatorClient
from verify.formats.findings import Outcome

FETCH_S = 6 * 3600.0
"""Deadline of a fetch: a full state may have hundreds of gigabytes."""
_MAX_SAID = 1024 * 1024


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of anybody's: plain files below `folder`, with no more bytes than it has.

    Raises:
        UserError: it is no such archive.
    """

    def plain(member: TarInfo, to: str) -> TarInfo:
        if not member.isreg() or member.issparse():
            raise tarfile.FilterError(f"{member.name[:200]!r} is no plain file")
        return tarfile.data_filter(member, to)

    kinds = (tarfile.TarError, OSError, ValueError, EOFError)
    with (
        reported("not an archive of plain files", archive, "its publisher is at fault", *kinds),
        TarFile.open(archive, "r:") as opened,
    ):
        opened.extractall(folder, filter=plain)  # noqa: S202 - `plain` refuses all else


@dataclass(frozen=True)
class State:
    """A published full state."""

    manifest: str
    """Digest of its manifest."""
    since: int | None
    """The state from which its steps can be trained again; None where their records were gone."""

    def __str__(self) -> str:
        return f"{self.manifest[:16]} (since {self.since})"


class PublishedStates:
    """The published full states of a run, as a stranger fetches them.

    Args:
        urls: origins, or relays of `states_run`.
        run: the run's name.
        root_public_key: pinned.
        folder: for what is fetched; a fetch that was killed goes on where it stopped.
    """

    def __init__(
        self, urls: Sequence[str], *, run: str, root_public_key: str, folder: Path
    ) -> None:
        self._urls, self._run, self._root, self._folder = urls, run, root_public_key, folder
        self._client = WeightsClient(
            urls,
            run=states_run(run),
            root_public_key=root_public_key,
            cache_dir=folder / "fetched",
        )
        self.history: dict[int, State] = {}
        """Every published state by number, as the newest one says."""
        self._kept: int | None = None

    def __enter__(self) -> PublishedStates:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def look(self) -> list[tuple[int, int]]:
        """Return the intervals that can be trained again: numbers of their first and last state.

        Raises:
            UserError: no state is published, or one was published twice.
        """
        place = ", ".join(self._urls)
        latest = self._latest()
        if latest is None:
            raise UserError(
                f"nobody serves full states of run {self._run}",
                place=place,
                remedy="its operator can set audit.states; the origin of its store serves them",
            )
        if latest.version not in self.history:
            found = self._said(latest.version, latest.manifest_digest)
            for number, before in self.history.items():
                if (now := found.get(number)) != before:
                    raise UserError(
                        f"the full state of version {number} was published twice: {before}, {now}",
                        place=place,
                        remedy="the publisher signed both: keep both manifests, they prove it",
                    )
            self.history = found
        kept = sorted(self.history)[-(self._kept or len(self.history)) :]
        return [
            (since, number)
            for number in kept
            if (since := self.history[number].since) is not None and since in kept
        ]

    def fetch(self, first: int, last: int) -> Path:
        """Fetch an interval that `look` gave, and make a run directory of it.

        Raises:
            UserError: not fetched in time, or it is no such interval.
        """
        run_dir = self._folder / "runs" / self._run
        self._client.prune({first, last})
        for number, names in ((first, ("state.tar",)), (last, ("*.tar",))):
            fetched = self._fetch(number, self.history[number].manifest)
            for archive in sorted(path for name in names for path in fetched.glob(name)):
                unpack(archive, run_dir)
        spec = self._own(self._spec(self._folder / "fetched" / f"v{last}"), run_dir)
        write_atomic(run_dir / SPEC_FILE, dump_resolved(spec))
        return run_dir

    def _latest(self) -> Latest | None:
        """Return the newest state that a server names; after a run ended it may be old."""
        found, run = [], states_run(self._run)
        for url in self._urls:
            with suppress(NoAnswer, BadSignature):
                get = partial(fetch_now, "GET", max_bytes=MAX_ROLES_BYTES, timeout_s=PERSON_S)
                data = get(url=f"{url}/{roles_name(run)}").content
                roles = open_roles(data, root_public_key=self._root, run=self._run)
                data = get(url=f"{url}/{latest_name(run)}").content
                found.append(open_latest(data, run=run, publishers=roles.publisher, old=True))
        return max(found, key=lambda each: each.issued, default=None)

    def _own(self, spec: RunSpec, run_dir: Path) -> RunSpec:
        """The spec as it holds here: nothing of it names a place on this machine."""
        sources = [redirected(source, run_dir / "data") for source in spec.data.sources]
        return spec.model_copy(
            update={
                "identity": spec.identity.model_copy(update={"root_public_key": self._root}),
                "checkpoints": spec.checkpoints.model_copy(update={"dir": None}),
                "learner": spec.learner.model_copy(update={"compile_cache": None}),
                "data": spec.data.model_copy(update={"sources": sources}),
            }
        )

    def _said(self, number: int, digest: str) -> dict[int, State]:
        """Return every published state, as one of them says."""
        fetched = self._fetch(number, digest)
        kinds = (MalformedJson, OSError, KeyError, TypeError, ValueError)
        place, remedy = fetched / HISTORY_FILE, "its publisher is at fault"
        with reported("not the list of published states", place, remedy, *kinds):
            said = read_object(place, MAX_HISTORY_BYTES)
            rows = [*said["states"], [number, digest, said["since"]]]
            found = {int(n): State(str(d), None if s is None else int(s)) for n, d, s in rows}
            if len(found) < len(rows) or [*found] != sorted(found):
                raise ValueError("not in order")
        audit = self._spec(fetched).audit
        self._kept = None if audit is None else audit.keep
        return found

    def _spec(self, fetched: Path) -> RunSpec:
        path = fetched / SPEC_FILE
        spec = parse_resolved(read_bounded(path, MAX_SPEC_BYTES), place=str(path))
        if spec.name != self._run:
            raise UserError(f"of run {spec.name!r}", place=str(path))
        return spec

    def _fetch(self, number: int, digest: str) -> Path:
        return self._client.fetch(number, manifest_digest=digest, deadline_s=FETCH_S)


def open_states(link: JoinLink, folder: Path) -> PublishedStates:
    """Open the published full states of a run.

    Args:
        link: with name and root; its server is a coordinator, or serves the states itself.
        folder: for what is fetched.

    Raises:
        UserError: the link is not whole, or its coordinator does not answer.
    """
    run, root = link.run, link.root
    if run is None or root is None:
        raise UserError(
            "names no run or no root key",
            place=str(link),
            remedy="take the run's whole link, http://HOST:PORT/#run=NAME&root=HEX",
        )
    url, urls = f"{link.coordinator}/{roles_name(states_run(run))}", [link.coordinator]
    with reported("does not answer", link.coordinator, "see whether it runs", NoAnswer):
        answer = fetch_now("GET", url, max_bytes=MAX_ROLES_BYTES, timeout_s=PERSON_S)
    if not answer.is_success:  # it serves no states: the coordinator says who does
        key = SigningKey.generate()  # anybody may ask
        client = CoordinatorClient(
            *(link.coordinator, key), run=run, root_public_key=root, deadline_s=PERSON_S
        )
        urls = [reachable(each, link) for each in client.site().weights]
    return PublishedStates(urls, run=run, root_public_key=root, folder=folder)


def replay_published(states: PublishedStates, first: int, last: int) -> tuple[Outcome, str]:
    """Fetch an interval of a run, train it again, and leave nothing of it.

    Args:
        states: of the run.
        first, last: one of its intervals.

    Returns:
        The outcome, `equal`, `consistent`, `refuted` or `failed`; and a line that says more.

    Raises:
        UserError: it cannot be fetched, or JAX is not installed.
    """
    run_dir = states.fetch(first, last)
    try:
        with TemporaryFile("w+") as out:
            code = replay(run_dir, f"{first}-{last}", out, "--json")
            out.seek(0)
            lines = out.read(_MAX_SAID).splitlines()
    finally:
        shutil.rmtree(run_dir)
    if not lines:  # the program has said why
        return "failed", f"steps {first} to {last - 1}: cannot be trained again, exit code {code}"
    said = json.loads(lines[-1])
    return said["outcome"], said["line"]


def replay_link(link: JoinLink, what: str, say: Callable[[str], None]) -> bool:
    """Train intervals of a run again, with nothing but its link; a line is said for each.

    Args:
        link: of the run, with its name and root.
        what: see `choose`.
        say: receives the lines.

    Returns:
        Whether none is refuted, or cannot be replayed.

    Raises:
        UserError: one cannot be fetched, or JAX is not installed.
    """
    sound = True
    with TemporaryDirectory(prefix="audit-") as folder, open_states(link, Path(folder)) as states:
        known = states.look()
        remedy = "name STEP, A-B or sample:K"
        for each in choose(what, known, sorted(states.history), link.coordinator, remedy):
            outcome, line = replay_published(states, *each)
            say(line)
            sound = sound and outcome in ("equal", "consistent")
    return sound
