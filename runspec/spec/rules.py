"""Rules that look across fields: each a small function with a stable code.

A rule is given a spec that already fits the schema and yields what breaks it. The place of a
violation is that of the named value, or of the nearest map that was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from runspec.spec.findings import Severity
from runspec.spec.schema import Hardware, Reward, RunSpec

_TOPOLOGY = re.compile(r"[0-9]{1,5}(x[0-9]{1,5})*")


@dataclass(frozen=True)
class Violation:
    location: tuple[str | int, ...]
    """Keys, and names of named objects, from the root."""
    message: str
    severity: Severity = "error"


Rule = Callable[[RunSpec], Iterator[Violation]]


def broken_rules(spec: RunSpec) -> Iterator[tuple[str, Violation]]:
    """Every violation of every rule, with the rule's code."""
    for code, rule in RULES.items():
        for violation in rule(spec):
            yield code, violation


def length_reward(spec: RunSpec) -> Reward | None:
    """The term that names the target lengths, where the run has one."""
    return next((term for term in spec.reward if term.kind == "target_length"), None)


def one_model(spec: RunSpec) -> Iterator[Violation]:
    if (spec.model.hf is None) == (spec.model.shape is None):
        said = "neither" if spec.model.hf is None else "both"
        yield Violation(("model",), f"exactly one of hf and shape is needed, {said} was given")
    if spec.model.revision is not None and spec.model.hf is None:
        yield Violation(("model", "revision"), "is the commit of model.hf, which is not given")


def warm_start(spec: RunSpec) -> Iterator[Violation]:
    if (spec.model.shape is None) != (spec.warm_start is None):
        message = (
            "model.shape has no weights: warm_start must make them"
            if spec.warm_start is None
            else "warm_start makes the weights of a model.shape, and none is given"
        )
        yield Violation(("model", "shape") if spec.warm_start is None else ("warm_start",), message)


def shape_heads(spec: RunSpec) -> Iterator[Violation]:
    shape = spec.model.shape
    if shape is None:
        return
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if shape.head_dim is not None and shape.head_dim % 2:
        yield Violation(
            ("model", "shape", "head_dim"), f"{shape.head_dim} is odd, RoPE turns pairs"
        )
    if shape.head_dim is None and shape.hidden_size % (2 * heads):
        yield Violation(
            ("model", "shape", "hidden_size"),
            f"{shape.hidden_size} does not give {heads} heads of an even size",
        )
    if heads % kv_heads:
        yield Violation(
            ("model", "shape", "num_key_value_heads"), f"{kv_heads} does not divide {heads} heads"
        )


def updates_divide_batch(spec: RunSpec) -> Iterator[Violation]:
    algorithm = spec.algorithm
    rollouts = algorithm.prompts_per_step * algorithm.group_size
    if rollouts % algorithm.updates_per_step:
        yield Violation(
            ("algorithm", "updates_per_step"),
            f"{algorithm.updates_per_step} does not divide the {rollouts} rollouts of a step "
            f"({algorithm.prompts_per_step} prompts x {algorithm.group_size})",
        )


def clip_bounds(spec: RunSpec) -> Iterator[Violation]:
    clip, cispo = spec.algorithm.clip, spec.algorithm.surrogate == "cispo"
    if clip.delta is not None and clip.delta <= 1 + clip.eps_high and not cispo:
        yield Violation(
            ("algorithm", "clip", "delta"),
            f"{clip.delta:g} must be greater than 1 + eps_high = {1 + clip.eps_high:g}",
        )
    # CISPO's weight may go without a lower bound, and its authors' does.
    if clip.eps_low >= 1 and not cispo:
        yield Violation(("algorithm", "clip", "eps_low"), f"{clip.eps_low:g} must be less than 1")


def cispo(spec: RunSpec) -> Iterator[Violation]:
    algorithm = spec.algorithm
    if algorithm.surrogate != "cispo":
        return
    if algorithm.ratio != "token":
        yield Violation(
            ("algorithm", "ratio"),
            "surrogate: cispo weighs each token by its own ratio: it goes with ratio: token",
        )
    if algorithm.clip.delta is not None:
        yield Violation(
            ("algorithm", "clip", "delta"),
            f"{algorithm.clip.delta:g} has no part in surrogate: cispo, whose weight 1 + eps_high "
            "bounds; set it to null",
        )


def stale_pi_old(spec: RunSpec) -> Iterator[Violation]:
    algorithm = spec.algorithm
    recomputed = algorithm.old_logprobs == "recompute" and algorithm.importance.cap is None
    if recomputed and algorithm.updates_per_step == 1 and algorithm.async_level > 0:
        yield Violation(
            ("algorithm", "old_logprobs"),
            "in the only update of a step the recomputed ratio is 1: no clip acts, and nothing "
            f"corrects a lag of up to {algorithm.async_level}; old_logprobs: sampler or "
            "importance.cap does",
            severity="warning",
        )


def importance_cap(spec: RunSpec) -> Iterator[Violation]:
    if spec.algorithm.importance.cap is not None and spec.algorithm.old_logprobs == "sampler":
        yield Violation(
            ("algorithm", "importance", "cap"),
            "with old_logprobs: sampler the weight pi_old / mu is 1 everywhere; "
            "it corrects old_logprobs: recompute",
        )


def task_advantage(spec: RunSpec) -> Iterator[Violation]:
    if spec.algorithm.advantage.normalize != "task":
        return
    term = length_reward(spec)
    if term is not None and term.form != "exact":
        yield Violation(
            ("algorithm", "advantage", "normalize"),
            "task needs a length term that is added to the task reward: form exact, "
            f"not {term.form}",
        )


def context_fits(spec: RunSpec) -> Iterator[Violation]:
    prompt, context = spec.data.max_prompt_tokens, spec.model.max_context
    packed = spec.learner.packing.tokens
    for pool in spec.samplers:
        longest = prompt + pool.max_new_tokens
        said = f"max_prompt_tokens {prompt} + max_new_tokens {pool.max_new_tokens} = {longest}"
        if longest > pool.max_model_len:
            yield Violation(
                ("samplers", pool.name, "max_model_len"),
                f"{pool.max_model_len} is less than {said}",
            )
        if pool.max_model_len > context:
            yield Violation(
                ("samplers", pool.name, "max_model_len"),
                f"{pool.max_model_len} is more than model.max_context = {context}",
            )
        if packed < longest:
            yield Violation(
                ("learner", "packing", "tokens"),
                f"{packed} cannot hold a sequence of pool {pool.name}: {said}",
            )


def target_length(spec: RunSpec) -> Iterator[Violation]:
    terms = [term for term in spec.reward if term.kind == "target_length"]
    for term in terms:
        needed = ("form", "targets") if term.form == "clip" else ("form", "alpha", "targets")
        for field in needed:
            if not getattr(term, field):
                yield Violation(("reward", term.name), f"kind target_length needs {field}")
    if len(terms) == len(spec.reward):
        yield Violation(("reward",), "no term grades the task itself")
    if terms and "{target}" not in spec.data.length_prompt:
        yield Violation(("data", "length_prompt"), "must say {target}, the length asked for")


def one_term_a_kind(spec: RunSpec) -> Iterator[Violation]:
    first: dict[str, str] = {}
    for term in spec.reward:
        if term.kind in first:
            yield Violation(
                ("reward", term.name, "kind"),
                f"a second term of kind {term.kind}; {first[term.kind]} is the first",
            )
        first.setdefault(term.kind, term.name)


def targets_reachable(spec: RunSpec) -> Iterator[Violation]:
    term = length_reward(spec)
    longest = max(term.targets or [0]) if term else 0
    for pool in spec.samplers:
        if term and longest >= pool.max_new_tokens:
            yield Violation(
                ("reward", term.name, "targets"),
                f"{longest} must be less than max_new_tokens = {pool.max_new_tokens} "
                f"of pool {pool.name}",
            )


def source_fields(spec: RunSpec) -> Iterator[Violation]:
    needed = {"reasoning_gym": ("dataset", "size"), "parquet": ("uri",)}
    for source in spec.data.sources:
        for field in needed.get(source.kind, ()):
            if getattr(source, field) is None:
                yield Violation(
                    ("data", "sources", source.name), f"kind {source.kind} needs {field}"
                )


def recomputable_sampling(spec: RunSpec) -> Iterator[Violation]:
    for pool in spec.samplers:
        sampling = pool.sampling
        where = ("samplers", pool.name, "sampling")
        if pool.trust == "untrusted" and not sampling.seeded:
            yield Violation(
                (*where, "seeded"),
                "an untrusted pool must sample by the lease's seed: without it best-of-n "
                "cannot be told from honest work",
            )
        if sampling.seeded or pool.trust == "untrusted":
            for field, value, neutral in (
                ("top_p", sampling.top_p, 1.0),
                ("top_k", sampling.top_k, -1),
            ):
                if value != neutral:
                    yield Violation(
                        (*where, field), f"must be {neutral} with seeded sampling, not {value}"
                    )


def one_temperature(spec: RunSpec) -> Iterator[Violation]:
    first = spec.samplers[0]
    for pool in spec.samplers[1:]:
        if pool.sampling.temperature != first.sampling.temperature:
            yield Violation(
                ("samplers", pool.name, "sampling", "temperature"),
                f"{pool.sampling.temperature:g} differs from {first.sampling.temperature:g} of "
                f"pool {first.name}: the loss knows one temperature",
            )


def topology_form(spec: RunSpec) -> Iterator[Violation]:
    asked: list[tuple[tuple[str, ...], Hardware]] = [(("learner",), spec.learner.hardware)]
    asked += [(("samplers", pool.name), pool.hardware) for pool in spec.samplers]
    for where, hardware in asked:
        if hardware.topology is not None and not _TOPOLOGY.fullmatch(hardware.topology):
            yield Violation(
                (*where, "hardware", "topology"), f"{hardware.topology!r} is not of the form 4x4x4"
            )


def mesh_fits(spec: RunSpec) -> Iterator[Violation]:
    mesh, hardware = spec.learner.mesh, spec.learner.hardware
    product = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    devices = hardware.count
    if hardware.topology is not None:
        if not _TOPOLOGY.fullmatch(hardware.topology):
            return  # `topology_form` says so
        devices = mesh.slices * prod(int(side) for side in hardware.topology.split("x"))
        if hardware.count not in (None, devices):
            of = f"{mesh.slices} slices of " if mesh.slices > 1 else ""
            yield Violation(
                ("learner", "hardware", "count"),
                f"{hardware.count}, but {of}topology {hardware.topology} has {devices} devices",
            )
    if devices is not None and product != devices:
        yield Violation(
            ("learner", "mesh"),
            f"data x fsdp x context x tensor = {product}, but there are {devices} devices",
        )
    if product % spec.learner.hosts:
        yield Violation(
            ("learner", "hosts"), f"{spec.learner.hosts} does not divide the {product} devices"
        )
    if getattr(mesh, mesh.slice_axis) % mesh.slices:
        yield Violation(
            ("learner", "mesh", "slices"),
            f"{mesh.slices} does not divide {mesh.slice_axis} = {getattr(mesh, mesh.slice_axis)}",
        )


def lora_targets(spec: RunSpec) -> Iterator[Violation]:
    targets = spec.learner.lora.targets if spec.learner.lora else []
    for target in sorted({target for target in targets if targets.count(target) > 1}):
        yield Violation(("learner", "lora", "targets"), f"names {target} more than once")


def rows_divide(spec: RunSpec) -> Iterator[Violation]:
    mesh, rows = spec.learner.mesh, spec.learner.packing.rows
    shards = mesh.data * mesh.fsdp
    if rows % shards:
        yield Violation(
            ("learner", "packing", "rows"), f"{rows} is not divisible by data x fsdp = {shards}"
        )
    if spec.learner.packing.tokens % mesh.context:
        yield Violation(
            ("learner", "packing", "tokens"),
            f"{spec.learner.packing.tokens} is not divisible by context = {mesh.context}",
        )


def versions_kept(spec: RunSpec) -> Iterator[Violation]:
    needed = spec.algorithm.async_level + 2
    if spec.broadcast.keep_versions < needed:
        yield Violation(
            ("broadcast", "keep_versions"),
            f"{spec.broadcast.keep_versions} is less than async_level + 2 = {needed}: a version "
            "would be removed while rollouts of it are sampled and checked",
        )


def relay_tree(spec: RunSpec) -> Iterator[Violation]:
    upstream = {relay.name: relay.upstream for relay in spec.broadcast.relays}
    for name, above in upstream.items():
        where = ("broadcast", "relays", name)
        if name == "origin":
            yield Violation(where, "origin is the publisher's own server, not a relay")
        for other in above:
            if other != "origin" and other not in upstream:
                known = ", ".join(["origin", *upstream])
                yield Violation((*where, "upstream"), f"no relay {other!r}; known: {known}")
    # A cycle is what is left when relays whose upstreams are all settled are taken away.
    settled = {"origin", *(o for above in upstream.values() for o in above if o not in upstream)}
    while more := {
        n for n, above in upstream.items() if n not in settled and settled >= set(above)
    }:
        settled |= more
    for name in sorted(set(upstream) - settled):
        yield Violation(("broadcast", "relays", name, "upstream"), "is part of, or below, a cycle")


def reserved_names(spec: RunSpec) -> Iterator[Violation]:
    reserved = {"root", "publisher", "coordinator", "validator", "learner", "origin", "relay"}
    for pool in spec.samplers:
        if pool.name in reserved:
            yield Violation(
                ("samplers", pool.name), "is the name of a role; call the pool something else"
            )


RULES: dict[str, Rule] = {
    "one-model": one_model,
    "warm-start": warm_start,
    "shape-heads": shape_heads,
    "updates-divide-batch": updates_divide_batch,
    "clip-bounds": clip_bounds,
    "cispo": cispo,
    "stale-pi-old": stale_pi_old,
    "importance-cap": importance_cap,
    "task-advantage": task_advantage,
    "context-fits": context_fits,
    "target-length": target_length,
    "one-term-a-kind": one_term_a_kind,
    "targets-reachable": targets_reachable,
    "source-fields": source_fields,
    "recomputable-sampling": recomputable_sampling,
    "one-temperature": one_temperature,
    "topology-form": topology_form,
    "mesh-fits": mesh_fits,
    "lora-targets": lora_targets,
    "rows-divide": rows_divide,
    "versions-kept": versions_kept,
    "relay-tree": relay_tree,
    "reserved-names": reserved_names,
}
