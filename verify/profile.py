"""A profile: the limits measured for one pair of sampler and validator, signed by the root key.

A profile is untrusted input: its size is limited, its form is exact, the root must have signed it,
and it must not have expired. It must name the limits that are looser than the published ones, and
none may be looser than `verify.loosest` allows.

Limits belong to a pair: a pool with the devices that a lease names, and the validators' hardware.
They are those of the spec, of a profile, or the published ones (`PairLimits`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from runspec.core.errors import UserError
from runspec.core.models import not_accepted
from runspec.core.roles import check_times
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.schema.fields import FloatType
from runspec.core.schema.load import MAX_PROFILE_BYTES
from runspec.core.signed import BadSignature, SigningKey, open_payload, sign_document
from verify.thresholds import ChunkLimits, GapNoise, Limits, Precision, limits_for, precision_of

KIND = "calibration"
FORMULA: Literal["exponential-tail/2"] = "exponential-tail/2"
"""Name of the formula from measurements to limits (`verify.calibration.derive`)."""
MAX_SHORT = 8

Name = Annotated[str, Field(min_length=1, max_length=200)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
NonNegative = Annotated[float, Field(ge=0.0)]
Time = Annotated[float, Field(ge=0.0, lt=2.0**37)]
"""Seconds since the epoch, up to the year 6325, which calendars can represent."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )


class SamplingSide(_Part):
    """Sampling of tokens. Log-probs and gaps depend on it, and so do the edges of top-k and
    top-p."""

    temperature: Annotated[float, Field(gt=0.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    top_k: int


class SamplerSide(_Part):
    """The sampler, as the spec describes the pool."""

    engine: Name
    precision: Precision
    hardware: Name
    """Kind of its devices."""
    tensor: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Devices that divide the model; null: as many as the pool's."""
    sampling: SamplingSide


class ValidatorSide(_Part):
    """The validator that recomputed."""

    engine: Name
    """An entry point of `runspec.prefill`."""
    precision: FloatType
    hardware: Name
    """Kind of `verify.hardware`, else of `learner.hardware`."""
    releases: Annotated[dict[Name, Name], Field(max_length=16)]
    """Releases of the engine and of its loaded libraries, for people."""


class ModelSide(_Part):
    """The model's size, from its config.json."""

    hidden_size: Natural
    num_hidden_layers: Natural
    vocab_size: Natural


class Measured(_Part):
    """The run and the samples that the numbers were measured on."""

    run: Name
    oldest_version: Natural
    newest_version: Natural
    submissions: Natural
    rollouts: Natural
    tokens: Natural
    chunks: Natural
    seeded: bool
    """Whether there were gaps to measure."""


class Number(_Part):
    """One measured number that has a limit; null: there is none, or it is not judged."""

    samples: Natural
    quantiles: Annotated[dict[Name, float], Field(max_length=8)]
    """Keys `0.5`, `0.9`, `0.99` and `1`, the largest."""
    bound: NonNegative | None
    """Bound that the tail formula gives."""
    published: NonNegative | None
    limit: NonNegative | None
    """The limit that the checks use."""
    note: Annotated[str, Field(max_length=200)]
    """Why the limit is not the bound."""


class ShortTable(_Part):
    """See `verify.thresholds.ChunkLimits`."""

    below: Annotated[int, Field(gt=0, le=65536)]
    mismatch_share: Share
    miss_share: Share
    mantissa_mean: NonNegative | None
    """Null if it is not judged."""
    mantissa_median: NonNegative


class LimitTable(_Part):
    """See `verify.thresholds.Limits`. `constant_ratio` is the published one, because it depends on
    forgers and not on rounding."""

    logprob_submission: NonNegative
    logprob_rollout: NonNegative
    gap: NonNegative
    gap_share: Share
    gap_max: NonNegative
    gap_mean: NonNegative
    mismatch_share: Share
    miss_share: Share
    mantissa_mean: NonNegative
    mantissa_median: NonNegative
    gap_noise: GapNoise | None
    """Null if the pool does not sample with a seed."""
    short: Annotated[list[ShortTable], Field(max_length=MAX_SHORT)]


class Profile(_Part):
    """Payload of a profile; times are seconds since the epoch."""

    version: Literal[1]
    formula: Literal["exponential-tail/2"]
    issued: Time
    expires: Time
    rate: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Largest share of honest rollouts that may be rejected by all numbers together, except numbers
    whose limit is below their bound."""
    sampler: SamplerSide
    validator: ValidatorSide
    model: ModelSide
    measured: Measured
    numbers: Annotated[dict[Name, Number], Field(max_length=64)]
    looser: Annotated[list[Name], Field(max_length=64)]
    """Numbers whose limit is looser than the published one, on purpose."""
    limits: LimitTable

    def as_limits(self) -> Limits:
        """Return the limits, with the published `constant_ratio`."""
        published = limits_for(self.sampler.precision, self.validator.precision)
        table = self.limits.model_dump(exclude={"short", "gap_noise"})
        short = tuple(
            ChunkLimits(**({"mantissa_mean": math.inf} | row.model_dump(exclude_none=True)))
            for row in self.limits.short
        )
        return Limits(
            **table,
            constant_ratio=published.constant_ratio,
            gap_noise=self.limits.gap_noise,
            short=short,
        )

    def above_published(self, times: float = 1.0) -> list[str]:
        """Return the names of its limits above so many times the published ones."""
        published = limits_for(self.sampler.precision, self.validator.precision)
        return looser_than_published(self.as_limits(), published, times)

    def devices(self, pool: SamplerPool) -> str:
        """Return the devices that were measured, in the form of `Lease.devices`."""
        return devices_of(pool, self.sampler.hardware, self.sampler.tensor or pool.parallel.tensor)

    def differences(self, spec: RunSpec, pool: SamplerPool) -> list[str]:
        """Return how a pool and its validators differ from those measured; empty if they do not.
        Of the sampler's devices, the pool must accept their kind."""
        here: dict[str, tuple[object, object]] = {
            "sampler engine": (self.sampler.engine, pool.engine),
            "sampler precision": (self.sampler.precision, precision_of(pool)),
            "validator engine": (self.validator.engine, spec.verify.engine),
            "validator precision": (self.validator.precision, spec.learner.compute_dtype),
            "validator hardware": (self.validator.hardware, validator_hardware(spec)),
        }
        if not_accepted(pool, self.sampler.hardware, None):
            here["sampler hardware"] = self.sampler.hardware, pool.hardware.kind
        here |= {what: (n, getattr(pool.sampling, what)) for what, n in self.sampler.sampling}
        return [f"{what} {then}, not {now}" for what, (then, now) in here.items() if then != now]


def devices_of(pool: SamplerPool, kind: str, tensor: int) -> str:
    """Return a worker's devices as a lease names them: `<kind> x <tensor>`; empty for those of the
    pool's `hardware` and `parallel`."""
    planned = kind == pool.hardware.kind and tensor == pool.parallel.tensor
    return "" if planned else f"{kind} x {tensor}"


def kind_and_tensor(pool: SamplerPool, devices: str) -> tuple[str, int]:
    """Return the kind and the number of a lease's devices; the inverse of `devices_of`."""
    kind, _, tensor = devices.partition(" x ")
    return (kind, int(tensor)) if devices else (pool.hardware.kind, pool.parallel.tensor)


def validator_hardware(spec: RunSpec) -> str:
    """Return the kind of accelerator of the validators."""
    return (spec.verify.hardware or spec.learner.hardware).kind


def sign_profile(profile: Profile, key: SigningKey) -> bytes:
    return sign_document(KIND, profile.model_dump(mode="json"), key)


def open_profile(
    data: bytes, *, root_public_key: str | None, now: float | None = None, dated: bool = True
) -> Profile:
    """Check a profile and return it.

    Args:
        data: the signed document.
        root_public_key: the only key that may have signed it; None: any key, for a profile that the
            caller signs again.
        now: seconds since the epoch; the clock if None.
        dated: whether the profile must be valid now.

    Raises:
        BadSignature: another key has signed it, it has expired, or a field is not valid.
    """
    keys = None if root_public_key is None else {root_public_key}
    codec = TypeAdapter(Profile)
    profile, _ = open_payload(codec, data, kind=KIND, keys=keys, max_bytes=MAX_PROFILE_BYTES)
    if dated:
        check_times(KIND, profile.issued, profile.expires, time.time() if now is None else now)
    limits = profile.as_limits()
    belows = [row.below for row in limits.short]
    if belows != sorted(set(belows)):
        raise BadSignature(f"{KIND}: limits of short chunks are not in ascending order")
    if hidden := set(profile.above_published()) - set(profile.looser):
        raise BadSignature(
            f"{KIND}: {min(hidden)} is looser than the published limit, and `looser` does not name "
            "it"
        )
    return profile


_OF_THEIR_OWN = ("short", "gap_noise")
"""Fields without a published limit: short chunks, and the budget of gaps."""


def looser_than_published(limits: Limits, published: Limits, times: float = 1.0) -> list[str]:
    """Return the names of the limits above so many times the published ones; of short chunks in the
    form `mismatch_share < 128`."""
    found = [
        name
        for name in LimitTable.model_fields
        if name not in _OF_THEIR_OWN and getattr(limits, name) > times * getattr(published, name)
    ]
    for row in limits.short:
        there = published.for_chunk(row.below - 1)
        found += [
            f"{name} < {row.below}"
            for name in ("mismatch_share", "miss_share", "mantissa_mean", "mantissa_median")
            if getattr(row, name) > times * getattr(there, name)
        ]
    return found


_OF_GAPS = ("gap", "gap_share", "gap_max", "gap_mean", "gap_noise")
"""Limits of gaps. A pool without a seed has no gaps, and the published limits apply there; the rest
of a seeded pool's profile holds for its log-probs and proofs."""


def profiles_of(spec: RunSpec, *, dated: bool = True) -> dict[str, Profile]:
    """Return the profiles of a resolved spec by name, each checked against its root key.

    Args:
        spec: the resolved spec.
        dated: whether the profiles must be valid now.

    Raises:
        UserError: a profile is not valid or too loose, or the spec pins no root key.
    """
    root, loosest = spec.identity.root_public_key, spec.verify.loosest
    found: dict[str, Profile] = {}
    for item in spec.verify.profiles:
        place = f"verify.profiles.{item.name}"
        if root is None or item.document is None:
            lacking = "identity.root_public_key" if root is None else "its contents"
            raise UserError(
                f"a profile, and the resolved spec lacks {lacking}",
                place=place,
                remedy="pin the root key that signed it, and apply the spec again",
            )
        try:
            document = item.document.encode("utf-8", "replace")
            found[item.name] = open_profile(document, root_public_key=root, dated=dated)
        except BadSignature as error:
            raise UserError(
                f"cannot be verified: {error}",
                place=place,
                remedy="calibrate again, and sign with the run's root key",
            ) from error
        if loose := found[item.name].above_published(loosest):
            raise UserError(
                f"{', '.join(loose)} of its limits are above {loosest:g} times the published ones",
                place=place,
                remedy="take it out, or raise verify.loosest for whoever says it has such devices",
            )
    return found


@dataclass(frozen=True)
class Judged:
    """The limits of one pair, and where they come from."""

    limits: Limits
    source: str
    """For people."""
    probation: bool
    """Whether the pair's accepted work is not trained on: see `verify.uncalibrated`."""


class PairLimits:
    """The limits of each pair; arguments and errors are those of `profiles_of`."""

    def __init__(self, spec: RunSpec, *, dated: bool = True) -> None:
        self._spec, self._profiles = spec, profiles_of(spec, dated=dated)
        self._pools = {pool.name: pool for pool in spec.samplers}
        self._known: dict[tuple[str, str], Judged] = {}

    def of(self, pool: str, devices: str = "") -> Judged:
        """Return the limits of a pool's workers with some devices.

        Args:
            pool: of the spec.
            devices: as in a lease, which the coordinator signed; empty: those of the pool.
        """
        pair = pool, devices
        if pair not in self._known:
            self._known[pair] = self._chosen(self._pools[pool], devices)
        return self._known[pair]

    def measured(self, pool: str) -> list[str]:
        """Return the devices of a pool that profiles cover, besides its own."""
        of = self._pools[pool]
        fitting = (p for p in self._profiles.values() if not p.differences(self._spec, of))
        return sorted({devices for p in fitting if (devices := p.devices(of))})

    def _chosen(self, pool: SamplerPool, devices: str) -> Judged:
        spec, precision = self._spec, precision_of(pool)
        limits = limits_for(precision, spec.learner.compute_dtype, spec.verify.thresholds)
        if any(given.name == precision for given in spec.verify.thresholds):
            return Judged(limits, f"verify.thresholds.{precision}", probation=False)
        for name, profile in self._profiles.items():
            if profile.devices(pool) == devices and not profile.differences(spec, pool):
                return Judged(*_calibrated(name, profile, pool, limits), probation=False)
        wanted = bool(devices and self._profiles) and spec.verify.uncalibrated == "discard"
        return Judged(limits, "the published ones", probation=wanted)


def _calibrated(
    name: str, profile: Profile, pool: SamplerPool, published: Limits
) -> tuple[Limits, str]:
    limits = profile.as_limits()
    if not pool.sampling.seeded:
        limits = replace(limits, **{each: getattr(published, each) for each in _OF_GAPS})
    until = datetime.fromtimestamp(profile.expires, UTC).date()
    looser = ", ".join(profile.looser)
    more = f", looser than published in {looser}" if looser else ""
    return limits, f"verify.profiles.{name}, until {until}{more}"


def require_profiles(spec: RunSpec, *, root_public_key: str) -> None:
    """Require that the root key that this process pins has signed the spec's profiles.

    Raises:
        UserError: another root has, or a profile is not valid.
    """
    pinned = spec.identity.root_public_key
    if spec.verify.profiles and pinned != root_public_key:
        raise UserError(
            f"profiles are signed by root {str(pinned)[:16]}, and {root_public_key[:16]} is pinned",
            place="verify.profiles",
            remedy="start with the root key of the spec, or calibrate under this one",
        )
    profiles_of(spec)


def require_model(spec: RunSpec, config: Mapping[str, object]) -> None:
    """Require that the profiles were measured on a model of the same size.

    Args:
        spec: the resolved spec.
        config: config.json of a policy version.

    Raises:
        UserError: a profile was measured on another size.
    """
    for name, profile in profiles_of(spec).items():
        for what, measured in profile.model.model_dump().items():
            if config.get(what) != measured:
                raise UserError(
                    f"measured on a model with {what} {measured}; this one has {config.get(what)}",
                    place=f"verify.profiles.{name}",
                    remedy="calibrate with the run's model",
                )
