"""Figures that the estimate of a run uses, each with its source, and what its hardware costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.hardware import device_count, device_of
from runspec.core.models.parameters import MEMORY_UTILIZATION
from runspec.core.spec.role_names import island_names, island_role, island_spec, members
from runspec.core.spec.schema import Hardware, RunSpec, SamplerPool
from runspec.estimate import assumed
from runspec.estimate.assumed import Assumed
from runspec.estimate.speed import prefill_tokens_per_s, validator_tokens_per_s


def check_tokens_per_s(spec: RunSpec, config: ModelConfig | None) -> Assumed | None:
    """Return a validator's rate; without `verify.hardware`, that of a replica of the first pool.

    None if that is unknown too, or if there are no validators.
    """
    verify, source = spec.verify, "verify.hardware"
    if not verify.validators:
        return None
    rate, hardware = validator_tokens_per_s(spec, config), verify.hardware
    if verify.tokens_per_s is not None:
        source = "verify.tokens_per_s"
    elif hardware is None and config is not None:
        rate = prefill_tokens_per_s(spec.samplers[0].hardware, spec, config)
        source = f"no verify.hardware: as a replica of {spec.samplers[0].name}"
    return None if rate is None else Assumed("a validator", rate, "tokens/s", source)


def inputs(spec: RunSpec, config: ModelConfig | None) -> tuple[Assumed, ...]:
    """Return all figures, in the order of a step."""
    lengths: tuple[Assumed, ...] = (
        (
            assumed.mean_prompt_tokens(spec),
            assumed.mean_new_tokens(spec),
            Assumed("length spread", assumed.LENGTH_SPREAD, "of the mean", assumed.OURS),
            assumed.filtered_share(spec),
        )
        if spec.supervised is None
        else (assumed.document_tokens(spec),)
    )
    loading = [Assumed("loading", assumed.LOAD_BYTES_S, "bytes/s", assumed.OURS)]
    deltas = []
    if spec.broadcast.format == "delta" and config is not None:
        deltas = [
            assumed.changed_share(spec, config),
            Assumed("finding what changed", assumed.DIFF_BYTES_S, "bytes/s", assumed.OURS),
            Assumed("rebuilding from a delta", assumed.REBUILD_BYTES_S, "bytes/s", assumed.OURS),
        ]
    links = {"broadcast.origin.upload": spec.broadcast.origin.upload}
    for relay in spec.broadcast.relays:
        links[f"broadcast.relays.{relay.name}.download"] = relay.download
        links[f"broadcast.relays.{relay.name}.upload"] = relay.upload
    links |= {f"samplers.{pool.name}.download": pool.download for pool in spec.samplers}
    return (
        *lengths,
        assumed.learner_mfu(spec),
        *_hardware(spec.learner.hardware, "learner.hardware", "peak_flops"),
        *_islands(spec),
        *(entry for pool in spec.samplers for entry in _pool(pool, spec)),
        *filter(None, [check_tokens_per_s(spec, config)]),
        Assumed("publishing", assumed.PUBLISH_BYTES_S, "bytes/s", assumed.OURS),
        *(loading if spec.samplers else ()),
        *deltas,
        *(
            Assumed("link", rate, "bits/s", path)
            for path, rate in links.items()
            if rate is not None
        ),
    )


def _pool(pool: SamplerPool, spec: RunSpec) -> Iterator[Assumed]:
    path = f"samplers.{pool.name}"
    if pool.tokens_per_s is not None:
        yield Assumed(
            f"a replica of {pool.name}", pool.tokens_per_s, "tokens/s", f"{path}.tokens_per_s"
        )
    else:
        yield assumed.sampler_bandwidth(spec)
        yield assumed.sampler_mfu(spec)
        yield from _hardware(pool.hardware, f"{path}.hardware", "memory_bandwidth", "peak_flops")
    if device_of(pool.hardware).memory is not None:
        yield Assumed("vLLM's share of memory", MEMORY_UTILIZATION, "share", "vLLM 0.32's default")


def _islands(spec: RunSpec) -> Iterator[Assumed]:
    for member in members(spec):
        path = f"learner.islands.members.{member.name}"
        if member.hardware is not None:
            yield from _hardware(member.hardware, f"{path}.hardware", "peak_flops")
        for field, rate in (("upload", member.upload), ("download", member.download)):
            if rate is not None:
                yield Assumed("link", rate, "bits/s", f"{path}.{field}")
        if member.latency is not None:
            yield Assumed("latency", member.latency, "s", f"{path}.latency")
    if members(spec):
        yield Assumed("making and reading shares", assumed.SHARE_BYTES_S, "bytes/s", assumed.OURS)
        yield Assumed("exchange of shares", assumed.ROUND_TRIPS, "round trips", assumed.OURS)
        yield Assumed("report", assumed.REPORT_TRIPS, "round trips", assumed.OURS)


_FIELDS = {"peak_flops": ("peak", "FLOP/s"), "memory_bandwidth": ("bandwidth", "bytes/s")}


def _hardware(hardware: Hardware, path: str, *fields: str) -> Iterator[Assumed]:
    device = device_of(hardware)
    for field in fields:
        value = getattr(device, field)
        if value is not None:
            said = getattr(hardware, field) is not None
            source = f"{path}.{field}" if said else f"table of {hardware.kind}"
            name, unit = _FIELDS[field]
            yield Assumed(f"{hardware.kind} {name}", value, unit, source)


@dataclass(frozen=True)
class Cost:
    """Cost in the currency of `price_per_hour`."""

    per_hour: float
    by_role: dict[str, float]
    """Cost an hour of `learner`, islands, the pools by name, and `validators`; only those with a
    price."""
    run: float | None
    """Cost of all steps; None if their time is unknown."""


def hourly_price(spec: RunSpec) -> float | None:
    """Return the sum of devices times `price_per_hour`; see `cost`."""
    found = cost(spec, None)
    return None if found is None else found.per_hour


def cost(spec: RunSpec, run_s: float | None) -> Cost | None:
    """Return the cost of an hour and of the whole run; None if nothing has a price.

    An hour costs the devices of learner, islands, pools x replicas and validators, times
    `price_per_hour`. Hardware without a price costs nothing. Hardware without a count has one
    device.

    Args:
        spec: names hardware, prices, replicas.
        run_s: seconds of all steps, if known.
    """
    learners = {"learner": spec.learner}
    learners |= {island_role(n): island_spec(spec, n).learner for n in island_names(spec)[1:]}
    used: list[tuple[str, Hardware | None, int, int]] = [
        *((role, own.hardware, 1, own.mesh.slices) for role, own in learners.items()),
        *((pool.name, pool.hardware, pool.replicas, 1) for pool in spec.samplers),
        ("validators", spec.verify.hardware, spec.verify.validators, 1),
    ]
    by_role = {
        role: hardware.price_per_hour * (device_count(hardware, slices) or 1) * processes
        for role, hardware, processes, slices in used
        if hardware is not None and hardware.price_per_hour is not None
    }
    if not by_role:
        return None
    per_hour = sum(by_role.values())
    return Cost(per_hour, by_role, None if run_s is None else per_hour * run_s / 3600)
