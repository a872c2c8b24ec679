"""Recomputes the submissions of an honest run, and measures the numbers that have limits.

A prefill engine without a network is given a cache that holds every version already, so it asks no
server. The cache holds links to the run's files, whose digests are checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.canonical import MalformedJson, digest_bytes, digest_file, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import SubmissionFiles, submission_files, weights_folder
from runspec.core.schema import RunSpec, SamplerPool
from verify.checks.prefill import logprob_diff
from verify.checks.rows import Rejected, open_rows
from verify.coordinator.ledger import read_events
from verify.coordinator.machine.events import LeaseGranted, SubmissionReceived
from verify.formats.lease import Lease
from verify.formats.submission import (
    MAX_ENVELOPE_BYTES,
    Rollout,
    max_submission_bytes,
    max_submission_rows,
)
from verify.plugins import WeightsLocation, load_prefill_engine
from verify.recompute import Recomputed, prefill_request, recompute
from verify.thresholds import Limits
from verify.toploc import TOP_K, MalformedProof
from verify.toploc.statistics import RADII, ChunkStatistics
from verify.truncation import Truncation

PAIR = tuple[Rollout, Recomputed]
NO_SERVER = "http://127.0.0.1:1"
"""Address of no server: the cache holds every version, so it is never asked."""
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class ReceivedSubmission:
    """A submission that the coordinator received, whatever its verdict."""

    submission: str
    lease: Lease
    lease_digest: str
    files: SubmissionFiles


def submissions_of(
    run_dir: Path, spec: RunSpec, pool: str, worker: str | None = None
) -> list[ReceivedSubmission]:
    """Return the submissions of a pool whose files are still there, by version, then as received.

    Rejected submissions are included: without them, what an honest pool is rejected for is hidden.

    Args:
        run_dir, spec: of the run.
        pool: name of the pool.
        worker: the only worker; None: all with the devices that the pool plans with.

    Raises:
        UserError: the ledger cannot be read.
    """
    leases = {
        event.digest: event.lease
        for event in read_events(run_dir, spec, LeaseGranted)
        if event.lease.pool == pool
        and (event.lease.worker == worker if worker else not event.lease.devices)
    }
    found: list[ReceivedSubmission] = []
    for event in read_events(run_dir, spec, SubmissionReceived):
        lease = leases.get(event.lease)
        if lease is not None and is_digest(event.submission):
            files = submission_files(run_dir, lease.step, event.submission)
            if files.submission.is_file() and files.submission_envelope.is_file():
                found.append(ReceivedSubmission(event.submission, lease, event.lease, files))
    return sorted(found, key=lambda taken: taken.lease.version)


def rollouts_of(taken: ReceivedSubmission, spec: RunSpec) -> Iterator[Rollout]:
    """Yield the rollouts that one version sampled, which a prefill can reproduce.

    Raises:
        UserError: the files are not those of the lease, so the run is not honest.
    """
    pool = next(pool for pool in spec.samplers if pool.name == taken.lease.pool)
    try:
        rows = open_rows(
            read_bounded(taken.files.submission_envelope, MAX_ENVELOPE_BYTES),
            read_bounded(taken.files.submission, max_submission_bytes(spec, pool)),
            lease=taken.lease,
            lease_digest=taken.lease_digest,
            max_rows=max_submission_rows(spec, pool),
            max_bytes=max_submission_bytes(spec, pool),
        )
    except (OSError, Rejected) as error:
        raise _dishonest(taken, error) from error
    for number, row in enumerate(rows):
        if not 0 < len(row.output_tokens) == len(row.logprobs):
            raise _dishonest(taken, f"row {number} has no log-prob for each token")
        if row.is_of_its_version and row.turns is None:  # measured of tasks with one turn alone
            yield row


def _dishonest(taken: ReceivedSubmission, reason: object) -> UserError:
    """Return the error of a submission that no honest worker sends."""
    return UserError(
        f"not an honest submission: {reason}",
        place=str(taken.files.submission),
        remedy="name the directory of a run whose workers were all your own",
    )


@dataclass(frozen=True)
class Version:
    """A policy version on this machine."""

    number: int
    manifest: Path
    folder: Path
    """Holds the files that the manifest names."""


def find_version(
    run_dir: Path, run: str, number: int, digest: str, fetched: Path | None
) -> Version | None:
    """Find the version whose manifest has the digest; None if it is gone.

    Args:
        run_dir: has weights/v<N>, and the origin's store with the manifest.
        run: name of the run.
        number: N.
        digest: manifest digest that the leases name.
        fetched: folder of v<N>, each with its manifest.json, as of a validator; if given, only it
            is searched.
    """
    folder = (fetched or weights_folder(run_dir)) / f"v{number}"
    stored = run_dir / "store" / "origin" / run / "versions" / str(number) / _MANIFEST
    manifest = folder / _MANIFEST if fetched is not None else stored
    try:
        if digest_bytes(read_bounded(manifest, _MAX_MANIFEST_BYTES)) != digest:
            return None
    except OSError:
        return None
    return Version(number, manifest, folder) if folder.is_dir() else None


def link_version(version: Version, cache: Path) -> Path:
    """Link all files of a version into a cache; files that the manifest lists are checked.

    If a version was published only as a delta, its manifest lists no files of tensors.

    Raises:
        UserError: a file does not have the digest of the manifest.
    """
    target = cache / f"v{version.number}"
    target.mkdir(parents=True)
    for name, digest in _objects(version.manifest).items():
        source = version.folder / name
        try:
            same = digest_file(source) == digest
        except OSError as error:
            raise _damaged(source, error.strerror or str(error)) from error
        if not same:
            raise _damaged(source, "other bytes than were published")
    for source in version.folder.iterdir():
        if source.is_file() and source.name != _MANIFEST:
            (target / source.name).symlink_to(source.resolve())
    (target / _MANIFEST).symlink_to(version.manifest.resolve())
    return target


def _objects(manifest: Path) -> Mapping[str, str]:
    """Return the BLAKE3 digest of each file that a manifest lists, by name."""
    try:
        data = read_bounded(manifest, _MAX_MANIFEST_BYTES)
        objects: Any = parse_object(data, max_bytes=_MAX_MANIFEST_BYTES)["payload"]["objects"]
        found = {str(name): str(each["blake3"]) for name, each in objects.items()}
    except (MalformedJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"no manifest: {error}", place=str(manifest)) from error
    for name in found:
        if Path(name).name != name:
            raise UserError(f"names a file {name[:80]!r}", place=str(manifest))
    return found


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"cannot be used: {reason}",
        place=str(path),
        remedy="name a folder of whole versions with --weights, as a validator's --dir has",
    )


AT_ONCE = 8
"""Submissions of one version that are prefilled together."""
_DEADLINE_S = 600.0


def recomputed(
    taken: Sequence[ReceivedSubmission],
    spec: RunSpec,
    pool: SamplerPool,
    cache: Path,
    margin: float,
) -> Iterator[tuple[ReceivedSubmission, list[PAIR]]]:
    """Recompute submissions of one pool with the engine that the spec names.

    Args:
        taken: what to recompute, in the order of their versions.
        spec: of the run.
        pool: that sampled.
        cache: folder that holds every version (`link_version`) while the engine is in use.
        margin: tau: how far logits may differ at the edge of top-k and top-p.

    Raises:
        UserError: files cannot be used, or no honest worker sends such proofs.
    """
    sampling = pool.sampling
    rule = Truncation(sampling.top_p, sampling.top_k, margin=margin)
    location = WeightsLocation(spec.name, [NO_SERVER], "0" * 64, cache)
    with closing(load_prefill_engine(spec, location)) as engine:
        for _, of_version in groupby(taken, key=lambda each: each.lease.version):
            while some := list(islice(of_version, AT_ONCE)):
                lease = some[0].lease
                engine.ensure_version(lease.version, lease.manifest_digest, deadline_s=_DEADLINE_S)
                rows = [list(rollouts_of(each, spec)) for each in some]
                found = iter(
                    recompute(
                        engine,
                        lease.version,
                        [
                            prefill_request(row, each.lease, seeded=sampling.seeded, end_token=None)
                            for each, its in zip(some, rows, strict=True)
                            for row in its
                        ],
                        temperature=sampling.temperature,
                        truncation=rule if rule.cuts else None,
                    )
                )
                for each, its in zip(some, rows, strict=True):
                    pairs = [(row, next(found)) for row in its]
                    for _, numbers in pairs:
                        if isinstance(numbers.proof, MalformedProof):
                            raise _dishonest(each, numbers.proof)
                    if pairs:
                        yield each, pairs


SHORT_BELOW = (128, 256, 1024)
"""Chunks with fewer activations than these have limits of their own, because all, most or many of
their activations are among the k largest."""


def key_of(name: str, below: int | None) -> str:
    """Return the name of a number of a class of chunks in a profile."""
    return name if below is None else f"{name} < {below}"


@dataclass
class Measurements:
    """Values of each number, one for each rollout or submission that has it."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: list[np.ndarray] = field(default_factory=list)
    """f32 [n] of each group of each submission, where the pool samples seeded."""
    submissions: int = 0
    rollouts: int = 0
    tokens: int = 0
    chunks: int = 0
    fewest_judged: int = TOP_K
    """k of the smallest chunk."""

    def take(self, pairs: Sequence[PAIR], limits: Limits) -> None:
        """Add a submission.

        Args:
            pairs: its rollouts, each with what was recomputed and well-formed proofs.
            limits: the published limits; their `gap_share` decides which gap tau must cover.
        """
        tokens = sum(len(row.output_tokens) for row, _ in pairs)
        self.submissions += 1
        self.rollouts += len(pairs)
        self.tokens += tokens
        distance = sum(logprob_diff(*pair) * len(pair[0].output_tokens) for pair in pairs)
        self.values["logprob_submission"].append(distance / tokens)
        groups: dict[int, list[np.ndarray]] = defaultdict(list)
        for row, found in pairs:
            self.values["logprob_rollout"].append(logprob_diff(row, found))
            self._take_proof(found.proof)
            if found.seeded_gap is not None:
                groups[row.group].append(found.seeded_gap)
                ordered = np.sort(found.seeded_gap)[::-1]
                self.values["gap"].append(float(ordered[int(limits.gap_share * len(ordered))]))
                self.values["gap_max"].append(float(ordered[0]))
        self.gaps += [np.concatenate(each) for each in groups.values()]

    def unit(self, name: str, below: int | None) -> float | None:
        """Return the distance between two neighbouring values of a count; None for other numbers.

        Shares of chunks with fewer than 128 activations have longer steps. The smallest chunk's
        steps are the longest; with shorter steps the tail would fall off too fast.
        """
        if "_share" in name:
            return 1.0 / (self.fewest_judged if below == TOP_K else TOP_K)
        return 1.0 if name == "mantissa_median" else None

    def _take_proof(self, proof: object) -> None:
        """Add the worst chunk of a rollout in each class, by each number."""
        assert isinstance(proof, list), "malformed proofs were refused before"
        classes: dict[int | None, list[ChunkStatistics]] = defaultdict(list)
        for chunk in proof:
            below = next((each for each in SHORT_BELOW if chunk.elements < each), None)
            classes[below].append(chunk)
            self.fewest_judged = min(self.fewest_judged, chunk.k)
        self.chunks += len(proof)
        for below, chunks in classes.items():
            worst: dict[str, float] = defaultdict(float)
            for chunk in chunks:
                # Shares are those of k.
                numbers = {
                    "mismatch_share": (chunk.exponent_mismatches + chunk.sign_mismatches) / chunk.k,
                    "mantissa_mean": chunk.mantissa_error_mean,
                    "mantissa_median": chunk.mantissa_error_median,
                }
                for radius, misses in zip(RADII, chunk.misses, strict=True):
                    numbers[f"miss_share {radius}"] = misses / chunk.k
                for name, value in numbers.items():
                    worst[name] = max(worst[name], value)
            for name, value in worst.items():
                self.values[key_of(name, below)].append(value)
