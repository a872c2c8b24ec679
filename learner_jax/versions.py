"""Policy versions: each is written once, with a probe; a step trained again gives the same bits.

The fingerprint of a program is the facts, besides spec and rollouts, that fix the bits of a
training step. On one fingerprint the same rollouts give the same bits. Elsewhere they give the same
numbers up to rounding, and the difference is reported.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from bridge.tensors import tree_digests
from broadcast.layout import TENSORS_NAME
from learner_jax.checkpoint import Saver, load_params, save_params
from learner_jax.distributed import LearnerRun, Peers
from learner_jax.leaves import HostLeaves
from learner_jax.leaves import load_params as load_weights
from learner_jax.logprobs import token_logprobs
from learner_jax.metrics import JsonLines
from learner_jax.model import bind
from learner_jax.packing import TokenBatch
from learner_jax.sharding import execution
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.models import ModelConfig
from runspec.core.process import RunStopped
from runspec.core.run_files import FINGERPRINTS_FILE, versions_in, weights_folder
from runspec.core.schema import RunSpec

DETERMINISTIC_GPU_FLAGS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
"""XLA_FLAGS, either of which leaves out the GPU's atomics, whose order is chance."""
_NOT_IN_RESULTS = ("--xla_force_host_platform_device_count", "--xla_dump")
_CPUINFO = Path("/proc/cpuinfo")


def fingerprint(spec: RunSpec, mesh: Mesh) -> dict[str, Any]:
    """The facts of this program, by name; JSON as it stands.

    Args:
        spec: of the run.
        mesh: that it trains on.
    """
    device, learner = mesh.devices.flat[0], spec.learner
    flags = os.environ.get("XLA_FLAGS", "").split()
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    # A repeatable result on a GPU also needs the autotuner's choices, beside compiled programs.
    on = {f"--{name}{value}" for name in DETERMINISTIC_GPU_FLAGS for value in ("", "=true", "=1")}
    kept = jax.config.values["jax_compilation_cache_dir"] is not None
    return {
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "machine": f"{platform.machine()} {_cpu_model()}".strip(),
        "threads": len(os.sched_getaffinity(0)) if device.platform == "cpu" else None,
        "nproc": os.environ.get("NPROC") if device.platform == "cpu" else None,  # of XLA's threads
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "optax": version("optax"),
        "runtime": device.client.platform_version,
        # Of this package's source: another order of additions gives other bits.
        "code": digest_bytes(b"".join(path.read_bytes() for path in sources))[:16],
        "xla_flags": sorted(flag for flag in flags if not flag.startswith(_NOT_IN_RESULTS)),
        "libtpu_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "matmul_precision": jax.config.values["jax_default_matmul_precision"],
        "x64": jax.config.values["jax_enable_x64"],
        "compute_dtype": learner.compute_dtype,
        "master_dtype": learner.master_dtype,
        "broadcast_dtype": spec.broadcast.dtype,
        "packing": learner.packing.model_dump(),
        "logits_chunk": learner.logits_chunk,
        "remat": learner.remat,
        "attention": learner.attention,
        "exact": device.platform != "gpu" or (kept and not on.isdisjoint(flags)),
    }


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe how two fingerprints differ: `mesh: {...} then, {...} now`, a line a fact."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in names]


def same_bits(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a step trained again must give the same bits."""
    return then == now and bool(now["exact"])


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


PROBE_SEQUENCES, PROBE_TOKENS = 4, 32
MAX_FINGERPRINTS_BYTES = 16 * 1024 * 1024


class VersionWriter:
    """Writes checkpoints/params/v<N> for each new version of a run, in the background.

    A version number is published once. After a restart the steps since the last full state are
    trained again, and their versions are not written again. Those that were made on this program's
    fingerprint must come out with the same bits; of others the difference is reported. Either way
    the published bits stay the version.

    Of a run with islands the trunk's writes versions; the others make the same bits for themselves.

    Args:
        run: whose versions these are; published bits are read back onto its mesh, its log is told
            of what is compared, and every method is collective over its processes.
        probe: from `build_probe`.
        saver: writes.
    """

    def __init__(
        self, run: LearnerRun, probe: Callable[[Any], dict[str, Any]], saver: Saver
    ) -> None:
        self._run, self._probe, self._saver = run, probe, saver
        self._params = run.params
        self._weights = weights_folder(run.folder)
        made_on = run.folder / "checkpoints" / FINGERPRINTS_FILE
        self._made_on = MadeOn(made_on, run.fingerprint, run.peers)
        self._exact = True
        supervised = run.spec.supervised is not None
        self._recompute = not supervised and run.spec.grpo.old_logprobs == "recompute"
        self.newest: int = run.peers.json_from_first(
            lambda: max([*versions_in(self._params), *versions_in(self._weights)], default=-1)
        )
        """The newest version that was ever written; -1 for none."""
        self.difference: float | None = None
        """Difference of the last version that was written or compared: 0 for the published bits,
        else the relative norm ||replayed - published|| / ||published||; None where there was
        nothing to compare with."""
        self.published = True
        """Whether the masters give the bits that the last version was published with."""

    def start(self, version: int, bits: Any, published: bool) -> Any | None:
        """Writes version 0, or compares the version of a full state.

        Args:
            version: its number.
            bits: its parameters in `broadcast.dtype`, from the masters.
            published: whether they should be those it was published with.

        Returns:
            The version's bits; None where nothing needs them (`old_logprobs: sampler`).

        Raises:
            RunStopped: they should, and are not.
        """
        if version > self.newest:
            self._write(version, bits)
        else:
            # A cast gives the same bits anywhere; a sum of adapters rounds as the machine does.
            adapted = self._run.spec.learner.lora is not None
            exact = published and (not adapted or self._made_on.same(version))
            bits = self._compare(version, bits, exact=exact)
            self._exact = exact or self.difference is not None
        return bits if self._recompute else None

    def write(self, version: int, trained: Any) -> Any | None:
        """Writes a new version, or compares one that was written before.

        Args:
            version: its number, larger than the last.
            trained: its parameters in `broadcast.dtype`, as they were just trained.

        Returns:
            The version's bits: `trained` itself, or those it was published with where they differ;
            None where nothing needs them.

        Raises:
            RunStopped: they differ, and were made on this program's fingerprint.
        """
        if version > self.newest:
            self._write(version, trained)
        else:
            # One step that differed leads to others that do.
            self._exact = self._exact and self._made_on.same(version)
            trained = self._compare(version, trained, exact=self._exact)
        return trained if self._recompute else None

    def _write(self, version: int, bits: Any) -> None:
        self.newest, self.difference, self.published = version, None, True
        if not self._run.trunk:
            return
        self._made_on.note(version)
        probe = self._probe(bits)
        self._saver.run(
            f"version {version}", lambda: save_params(self._params, version, bits, probe)
        )

    def _compare(self, version: int, replayed: Any, *, exact: bool) -> Any:
        run, peers, config = self._run, self._run.peers, self._run.config
        folders, weights = (self._weights, self._params), self._weights / f"v{version}"
        # The name of the folder that holds the version as it was written; "" where it is gone.
        place = peers.json_from_first(
            lambda: next((each.name for each in folders if version in versions_in(each)), "")
        )
        if not place:
            run.log.info("version %d is published and pruned: nothing to compare with", version)
            self.difference, self.published = None, exact
            return replayed
        before = None
        if place == self._params.name:
            try:
                before = load_params(self._params, version, replayed)
            except UserError:
                if version in versions_in(self._params):
                    raise
            if not peers.all_of(before is not None):
                return self._compare(version, replayed, exact=exact)  # the publisher has moved on
        dtype = run.spec.broadcast.dtype
        now = tree_digests(HostLeaves(replayed), config, dtype)
        then = {} if before is None else tree_digests(HostLeaves(before), config, dtype)

        def differences() -> list[str]:
            published = then
            if before is None:  # the export wrote them
                records = json.loads((weights / TENSORS_NAME).read_bytes())["tensors"]
                published = {name: record["blake3"] for name, record in records.items()}
            return [name for name, digest in now.items() if published.get(name) != digest]

        differing = peers.json_from_first(differences)
        self.difference, self.published = 0.0, not differing
        if not differing:
            run.log.info("version %d, trained again, has the published bits", version)
            return replayed
        said = (
            f"version {version}, trained again, differs from the published one in "
            f"{len(differing)} of {len(now)} tensors, the first is {differing[0]}"
        )
        if exact:
            raise RunStopped(
                said,
                place=str(weights),
                remedy="something that bits depend on has changed unseen, or a file has: compare "
                "the batch manifests with a copy; to go on from here all the same, start a run of "
                "another name from these weights",
            )
        if before is None:
            before = load_weights(weights, config, run.mesh, peers)
        self.difference = float(_relative_difference(replayed, before))
        run.log.warning(
            "%s, by %.2g in relative norm; the published bits stay the version",
            *(said, self.difference),
        )
        return before


class MadeOn:
    """On what each version was made: lines {"step": first version, "fingerprint": {...}}."""

    def __init__(self, path: Path, fingerprint: dict[str, Any], peers: Peers) -> None:
        self._now = fingerprint
        self._file = JsonLines(path) if peers.first else None
        data = peers.from_first(lambda: read_bounded(path, MAX_FINGERPRINTS_BYTES))
        self._lines = [json.loads(line) for line in data.splitlines()]

    def note(self, version: int) -> None:
        """A new version is made here."""
        if self._lines and self._lines[-1]["fingerprint"] == self._now:
            return
        line = {"fingerprint": self._now}
        self._lines.append({"step": version, **line})
        if self._file is not None:
            # A version may have been begun elsewhere, and killed before it was there.
            self._file.write(version, [line])

    def same(self, version: int) -> bool:
        """Whether a version that was written before must have the same bits here."""
        then = [line for line in self._lines if line["step"] <= version]
        return bool(then) and same_bits(then[-1]["fingerprint"], self._now)


@jax.jit
def _relative_difference(a: Any, b: Any) -> Float[Array, ""]:
    """||a - b|| / ||b|| over all leaves, in float32."""

    def norm(tree: Any) -> Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    a, b = (jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (a, b))
    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(b)


def build_probe(spec: RunSpec, config: ModelConfig, mesh: Mesh) -> Callable[[Any], dict[str, Any]]:
    """Return a function from published parameters to the contents of probe.json.

    The probe is fixed token ids with the learner's log-probs of them under a version's bits. A
    sampler asks its engine the same after a load. That covers what cannot be read back from the
    engine: repacked tensors, stale caches, a wrong configuration.

        {"sequences": [{"tokens": [t_0 .. t_m], "logprobs": [m numbers]}, ...]}

    logprobs[i] is of t_(i+1) given the tokens before it, at temperature 1.
    """
    length = min(PROBE_TOKENS, config.max_position_embeddings)
    drawn = np.random.default_rng([spec.seed, 3])
    tokens = drawn.integers(0, config.vocab_size, (PROBE_SEQUENCES, length)).astype(np.int32)
    targets = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    batch = TokenBatch(
        tokens=tokens,
        targets=targets,
        segment_ids=np.ones_like(tokens),
        positions=np.tile(np.arange(tokens.shape[1], dtype=np.int32), (PROBE_SEQUENCES, 1)),
    )

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def score(params: Any) -> Float[Array, "B T"]:
        policy = bind(config, params)
        how = execution(spec.learner, mesh, remat="none")
        hidden = policy(batch.tokens, batch.segment_ids, batch.positions, how)
        return token_logprobs(hidden, policy.head_weight(), batch.targets, temperature=1.0)[0]

    def probe(params: Any) -> dict[str, Any]:
        sequences = zip(tokens.tolist(), np.asarray(score(params))[:, :-1].tolist(), strict=True)
        return {"sequences": [{"tokens": ids, "logprobs": values} for ids, values in sequences]}

    return probe
