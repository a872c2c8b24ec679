"""Calibrates one pool: recomputes the submissions of its run, measures, and derives a profile."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.spec.plugins import PREFILL_GROUP
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec, SamplerPool
from verify import profile as form
from verify.calibration.derive import Derived, as_table, derive
from verify.calibration.honest_run import Taken, Version, find_version, submissions_of
from verify.calibration.measure import PAIR, Measurements, Rejections
from verify.calibration.prefills import Change, Prefills
from verify.thresholds import Limits, limits_for, precision_of

_LIBRARIES = ("jax", "torch", "vllm", "transformers")
_MAX_CONFIG_BYTES = 1024 * 1024
_VALID_S = 365 * 86400.0
_COUNTS = ("submissions", "rollouts", "tokens", "chunks")
PERTURBED_SUBMISSIONS = 32
"""Number of submissions that are judged with perturbed weights, taken evenly from all."""


@dataclass(frozen=True)
class Order:
    """The run and pool to calibrate, and how."""

    run_dir: Path
    pool: str
    fetched: Path | None = None
    """Folder of fetched versions; None: those of the run directory."""
    rate: float = 1e-6
    """Share of honest rollouts that may be rejected."""
    allow_looser: bool = False
    perturbed: Sequence[tuple[str, Change]] = ()
    """Perturbed weights to test the limits with, by name."""


@dataclass(frozen=True)
class Power:
    """Rejections of submissions under some weights, by published limits and by the profile."""

    weights: str
    published: Rejections
    profile: Rejections


@dataclass(frozen=True)
class Outcome:
    """A profile, and what its limits reject."""

    profile: form.Profile
    power: list[Power]
    """Rejections under the right weights first, then under each perturbation."""


def calibrate(order: Order, log: logging.Logger) -> Outcome:
    """Measure a pool and derive its profile.

    Raises:
        UserError: there are no honest submissions, or too few.
    """
    spec = load_resolved(order.run_dir)
    pool = _pool(spec, order)
    published = limits_for(precision_of(pool), spec.learner.compute_dtype)
    taken, versions = _with_weights(order, spec, log)
    prefills = Prefills(spec, pool, versions, published.gap, log)
    count = min(PERTURBED_SUBMISSIONS, len(taken))
    some = [taken[i * len(taken) // count] for i in range(count)]
    measured, kept = Measurements(), list[list[PAIR]]()
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        for each, pairs in prefills.of(taken, Path(folder) / "right"):
            measured.take(pairs, published)
            if each in some:
                kept.append(pairs)
        derived = derive(measured, published, rate=order.rate, allow_looser=order.allow_looser)
        power = [_judged("right weights", kept, derived, published)]
        for name, change in order.perturbed:
            log.info("perturbed: %s", name)
            # The folder holds a copy of the weights of every version: remove it before the next.
            with tempfile.TemporaryDirectory(dir=folder) as copies:
                found = [pairs for _, pairs in prefills.of(some, Path(copies) / "weights", change)]
            power.append(_judged(name, found, derived, published))
    return Outcome(_profile(order, spec, pool, derived, measured, versions), power)


def _pool(spec: RunSpec, order: Order) -> SamplerPool:
    for pool in spec.samplers:
        if pool.name == order.pool:
            return pool
    raise UserError(
        f"no pool {order.pool[:80]!r}",
        place=str(order.run_dir),
        remedy=f"name one of {', '.join(pool.name for pool in spec.samplers)}",
    )


def _with_weights(
    order: Order, spec: RunSpec, log: logging.Logger
) -> tuple[list[Taken], dict[int, Version]]:
    """Return the submissions whose weights are still there, and their versions."""
    found = submissions_of(order.run_dir, spec, order.pool)
    digests = {taken.lease.version: taken.lease.manifest_digest for taken in found}
    versions = {
        number: where
        for number, digest in digests.items()
        if (where := find_version(order.run_dir, spec.name, number, digest, order.fetched))
    }
    taken = [each for each in found if each.lease.version in versions]
    log.info(
        "%d submissions of pool %s, %d of them with weights on this machine (versions %s)",
        len(found),
        order.pool,
        len(taken),
        ", ".join(map(str, sorted(versions))) or "none",
    )
    if not taken:
        raise UserError(
            f"no submission of pool {order.pool} whose weights are on this machine",
            place=str(order.run_dir),
            remedy="calibrate while the run is up or soon after, or keep more versions "
            "(`broadcast.keep_versions`); --weights names a folder of fetched ones",
        )
    return taken, {each.lease.version: versions[each.lease.version] for each in taken}


def _judged(
    name: str, submissions: Sequence[Sequence[PAIR]], derived: Derived, published: Limits
) -> Power:
    before, after = Rejections(published), Rejections(derived.limits)
    for pairs in submissions:
        before.take(pairs)
        after.take(pairs)
    return Power(name, before, after)


def _profile(
    order: Order,
    spec: RunSpec,
    pool: SamplerPool,
    derived: Derived,
    measured: Measurements,
    versions: dict[int, Version],
) -> form.Profile:
    now = time.time()
    return form.Profile(
        version=1,
        formula=form.FORMULA,
        issued=now,
        expires=now + _VALID_S,
        rate=order.rate,
        sampler=form.SamplerSide(
            engine=pool.engine,
            precision=precision_of(pool),
            hardware=pool.hardware.kind,
            sampling=form.SamplingSide.model_validate(pool.sampling, from_attributes=True),
        ),
        validator=form.ValidatorSide(
            engine=spec.verify.engine,
            precision=spec.learner.compute_dtype,
            hardware=form.validator_hardware(spec),
            releases=_releases(spec.verify.engine),
        ),
        model=_model_side(versions[max(versions)].folder / "config.json"),
        measured=form.Measured(
            run=spec.name,
            oldest_version=min(versions),
            newest_version=max(versions),
            **{count: getattr(measured, count) for count in _COUNTS},
            seeded=pool.sampling.seeded,
        ),
        numbers=derived.numbers,
        looser=derived.looser,
        limits=as_table(derived.limits),
    )


def _model_side(path: Path) -> form.ModelSide:
    try:
        config: dict[str, Any] = parse_object(
            read_bounded(path, _MAX_CONFIG_BYTES), max_bytes=_MAX_CONFIG_BYTES
        )
        return form.ModelSide(**{name: config[name] for name in form.ModelSide.model_fields})
    except (OSError, MalformedJson, KeyError, ValueError) as error:
        raise UserError(f"does not say the model's size: {error}", place=str(path)) from error


def _releases(engine: str) -> dict[str, str]:
    """Return the releases of the engine's package and of the libraries that it has loaded."""
    points = [p for p in entry_points(group=PREFILL_GROUP) if p.name == engine and p.dist]
    found = {point.dist.name: point.dist.version for point in points if point.dist}
    names = packages_distributions()  # vLLM's distribution has a name for each kind of hardware
    loaded = [dist for name in _LIBRARIES if name in sys.modules for dist in names.get(name, [])]
    return found | {dist: version(dist) for dist in loaded}
