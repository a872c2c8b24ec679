"""Full states of a run: where it starts or resumes, how it saves its state, and adapters from one.

A run resumes at its newest full state, or starts at version 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridge.model_files import output_directory
from bridge.orbax_io import open_leaves, read_leaf
from bridge.weight_map import Entry, entry
from broadcast.layout import states_run, stored_versions
from learner_jax import checkpoint
from learner_jax.checkpoint import (
    StateInfo,
    state_steps,
)
from learner_jax.distributed import LearnerRun
from learner_jax.feed import ManifestReader, manifest_digest
from learner_jax.leaves import LeafPath, load_params, write_leaves
from learner_jax.step import Programs, TrainState
from learner_jax.versions import VersionWriter, differences
from runspec.core import run_files
from runspec.core.canonical import canonical_json, digest_bytes, digest_file
from runspec.core.errors import UserError
from runspec.core.files import Folder, temporary_name, write_atomic
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.models.parameters import adapter_rows, axis_sizes
from runspec.core.run_files import ARRAYS_NAME, initial_model
from runspec.core.schema import RunSpec
from runspec.core.schema.learner import Lora
from runspec.core.schema.load import load_resolved
from verify.formats.batch import FILE_NAME as BATCH_FILE


@dataclass(frozen=True)
class Start:
    """The state in which the loop begins."""

    step: int
    """The next step to train."""
    state: TrainState
    reference: Any | None
    """Version 0's bits; None where no KL is asked for."""
    base: Any | None
    """The frozen weights under adapters; None where the weights are trained."""
    model_digest: str
    """Names version 0."""
    corpus: str | None
    """Digest of the documents; None for runs that train on rollouts."""
    batch: str | None
    """Digest of the batch manifest trained last."""
    published: bool
    """Whether the masters should give version `step` its published bits."""
    beside: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of an island beside the state; empty at version 0 and for a run with one learner."""


def find_start(
    run: LearnerRun, programs: Programs, reader: ManifestReader[Any] | None, corpus: str | None
) -> Start:
    """Collective: reads the newest full state, or version 0; removes what was never finished.

    Args:
        run: its log is told what differs from the program that wrote the state.
        programs: of the run.
        reader: process 0's.
        corpus: digest of the documents; None for runs that train on rollouts.

    Raises:
        UserError: the state is damaged, or of another run.
    """
    spec, model_dir = run.spec, initial_model(run.folder)
    states = run.states

    def newest() -> dict[str, Any]:
        for folder in (states, run.params):
            run_files.clear_unfinished(folder, run.log)
        digest = model_digest(model_dir)
        steps = state_steps(states)
        if not steps:
            return {"digest": digest}
        info = checkpoint.check_state(states, steps[-1])
        assert reader is not None, "process 0 has one"
        check_run(info, spec, digest, corpus, states)
        _check_position(info, run.folder, reader)
        return {"digest": digest, "info": asdict(info)}

    found = run.peers.json_from_first(newest)
    _require_one_folder(run, states)
    info = StateInfo(**found["info"]) if "info" in found else None
    return start_at(run, programs, states, info, found["digest"], corpus)


def start_at(
    run: LearnerRun,
    programs: Programs,
    states: Folder,
    info: StateInfo | None,
    digest: str,
    corpus: str | None,
) -> Start:
    """Collective: reads a full state, or version 0.

    Args:
        run: its log is told what differs from the program that wrote the state.
        programs: of the run.
        states: folder of the full states.
        info: of one that was checked; None: version 0.
        digest: names version 0.
        corpus: digest of the documents; None for runs that train on rollouts.

    Raises:
        UserError: the state is damaged, or is not of the run's shapes.
    """
    spec, model_dir = run.spec, initial_model(run.folder)
    compared = spec.supervised is None and spec.grpo.kl.coef > 0
    adapted = spec.learner.lora is not None
    needed = info is None or compared or adapted
    initial = load_params(model_dir, run.config, run.mesh, run.peers) if needed else None
    frozen = programs.freeze(initial) if compared or adapted else None
    reference, base = frozen if compared else None, frozen if adapted else None
    if info is None:
        return Start(0, programs.init_state(initial), reference, base, digest, corpus, None, True)
    for difference in differences(info.fingerprint, run.fingerprint):
        run.log.info("not the program that wrote the full state: %s", difference)
    state = checkpoint.load_state(states, info.step, programs.abstract_state)
    return Start(
        *(info.step, state, reference, base),
        *(digest, corpus, info.batch, info.published),
        checkpoint.load_beside(states, info),
    )


def _require_one_folder(run: LearnerRun, states: Folder) -> None:
    """Collective: sees that all processes write full states to the same folder.

    Raises:
        UserError: one does not see what process 0 wrote there.
    """
    if run.peers.count == 1:
        return

    def write_mark() -> str:
        name = temporary_name(Path("seen")).name
        write_atomic(states / name, b"")
        return name

    mark = states / run.peers.json_from_first(write_mark)
    seen = run.peers.all_of(mark.exists())
    if run.peers.first:
        mark.unlink()
    if not seen:
        raise UserError(
            "the learner's processes do not see each other's checkpoints",
            place=f"checkpoints.dir ({states} in process {run.peers.index})",
            remedy="set checkpoints.dir to an object store, or to a folder that all hosts share",
        )


def check_run(
    info: StateInfo, spec: RunSpec, model_digest: str, corpus: str | None, states: Folder
) -> None:
    """Check that a state is of this run: row numbers of documents mean what they meant.

    Raises:
        UserError: it is of another starting model, seed or corpus.
    """
    rename = "give the run another name, or delete it with `runspec delete`"
    documents = "the documents are not those it was trained on:"
    for what, then, now, remedy in (
        ("a state of another starting model:", info.reference, model_digest, rename),
        ("a state of another seed:", info.seed, spec.seed, rename),
        (
            *(documents, info.corpus, corpus),
            "restore the files of data.sources and the tokenizer as they were, or give the run "
            "another name",
        ),
    ):
        if then != now:
            raise UserError(
                f"{what} {str(then)[:16]}, not {str(now)[:16]}",
                place=str(states / f"step_{info.step}"),
                remedy=remedy,
            )


def _check_position(info: StateInfo, run_dir: Path, reader: ManifestReader[Any]) -> None:
    """The batch that the state was trained on last is still the one that lies there."""
    path = run_files.step_folder(run_dir, info.step - 1) / BATCH_FILE
    if info.batch is None or not path.exists():
        return
    # By what it says: a rollback makes new keys, and the old signature is nobody's any more.
    found = manifest_digest(reader.manifest(info.step - 1, signed=False))
    if found != info.batch:
        raise UserError(
            f"not the batch manifest that was trained: {found[:16]}, the full state of step "
            f"{info.step} names {info.batch[:16]}",
            place=str(path),
            remedy="put the run directory back together from one copy",
        )


def model_digest(model_dir: Path) -> str:
    """One digest of a model directory's weights, read once, however large."""
    files = {path.name: digest_file(path) for path in sorted(model_dir.glob("*.safetensors"))}
    if not files:
        raise UserError(
            "no safetensors files",
            place=str(model_dir),
            remedy="run `python -m runspec.role warm-start`, or point model.hf at weights",
        )
    return digest_bytes(canonical_json(files))


class StateWriter:
    """Writes checkpoints/state/step_<N>, in the background.

    Args:
        run: whose states these are; `write` is collective over its processes.
        start: what the loop begins with.
        versions: knows whether the masters give the published bits.
        saver: writes.
    """

    def __init__(
        self, run: LearnerRun, start: Start, versions: VersionWriter, saver: checkpoint.Saver
    ) -> None:
        self._run, self._versions, self._saver = run, versions, saver
        self._reference, self._corpus = start.model_digest, start.corpus
        self._newest = start.step

    def clear(self) -> None:
        """Remove the full states: an island that joins anew leaves what it had."""
        folder = self._run.states

        def remove() -> None:
            if self._run.peers.first:
                for step in state_steps(folder):
                    self._run.log.info("%s is removed", folder / f"step_{step}")
                    run_files.remove_entry(folder / f"step_{step}")

        self._run.peers.each(remove)
        self._newest = 0

    def write(
        self,
        step: int,
        state: TrainState,
        *,
        batch: str | None,
        beside: Mapping[str, np.ndarray],
    ) -> None:
        """Saves the state after `step` steps, unless it is saved already.

        Args:
            step: rollout steps trained.
            state: copied to the host before this returns.
            batch: digest of the batch manifest trained last.
            beside: an island's arrays; nobody writes to them afterwards.
        """
        if step == self._newest:
            return
        self._newest, run = step, self._run
        info = StateInfo(
            step=step,
            batch=batch,
            seed=run.spec.seed,
            reference=self._reference,
            corpus=self._corpus,
            published=self._versions.published,
            fingerprint=run.fingerprint,
        )

        def begin() -> checkpoint.Finish:
            keep, also = run.spec.checkpoints.keep, self._unpublished()
            write = checkpoint.save_state(
                *(run.states, info, state), keep=keep, also=also, beside=beside
            )

            def finish() -> None:
                write()
                self._drop_rollouts(step)

            return finish

        self._saver.run(f"the full state of step {step}", begin)

    def _unpublished(self) -> list[int]:
        """The states that the publisher has still to read."""
        audit, published = self._run.spec.audit, self._published
        wanted = [] if audit is None else state_steps(self._run.states)
        return [s for s in wanted if audit and s > published and s % audit.states == 0]

    @property
    def _published(self) -> int:
        """The newest full state that is published; 0 for none."""
        store, run = self._run.folder / "store" / "origin", states_run(self._run.spec.name)
        return max(stored_versions(store, run), default=0)

    def _drop_rollouts(self, step: int) -> None:
        """Remove the rollout files of steps that nobody needs, except their batch manifests."""
        run, spec = self._run, self._run.spec
        if not run.peers.first:
            return
        # A step trains rollouts leased up to `async_level` steps before it.
        lag = 0 if spec.supervised else spec.grpo.async_level
        oldest, kept = state_steps(run.states)[0], spec.storage.rollouts
        needed = (oldest if spec.audit is None else min(oldest, self._published)) - lag
        passed = needed if kept is None else min(needed, step - kept)
        for old in run_files.numbered(run.folder / "rollouts", "step_"):
            for path in run_files.step_folder(run.folder, old).iterdir() if old < passed else ():
                if path.suffix in (".safetensors", ".json") and path.name != BATCH_FILE:
                    path.unlink(missing_ok=True)


CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def export_adapter(run_dir: Path, out_dir: Path, *, step: int | None = None) -> int:
    """Writes the adapters of a full state; policy version `step` is the base with them merged.

        adapter_config.json          rank, alpha and the matrices that have an adapter
        adapter_model.safetensors    for each of them lora_A [r, in] and lora_B [out, r], float32

    The format is that of https://github.com/huggingface/peft. The tree is that of
    `learner_jax.model`: leaves `a` [L, in..., r] and `b` [L, r, out...] for each matrix W of the
    layers, to which they add (alpha / r) A B.

    Args:
        run_dir: of a run with `learner.lora`.
        out_dir: the PEFT directory; must not exist.
        step: of which full state; by default the newest.

    Returns:
        The step.

    Raises:
        UserError: no LoRA run, no such state, a damaged one, or `out_dir` exists.
    """
    spec = load_resolved(run_dir)
    lora, states = spec.learner.lora, run_files.state_folder(run_dir, spec)
    if lora is None:
        raise UserError("this run trains no adapters", place="learner.lora")
    steps = state_steps(states)
    if not steps or step not in (None, *steps):
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"no full state of step {step}; there are: {there}", place=str(states))
    step = steps[-1] if step is None else step
    checkpoint.check_state(states, step)
    model_dir, folder = (
        initial_model(run_dir),
        states / f"step_{step}" / ARRAYS_NAME,
    )
    config = load_config(model_dir)
    entries = adapter_map(config, rank=lora.rank, targets=lora.targets)
    shapes = {("params", *entry.path): entry.leaf_shape for entry in entries}
    stores = open_leaves(folder, shapes, among_others=True)
    leaves = {path[1:]: read_leaf(store, path[1:], place=folder) for path, store in stores.items()}
    base = spec.model.hf or str(model_dir.resolve())
    write_adapter(out_dir, leaves, config, lora=lora, base_model=base)
    return step


def adapter_map(config: ModelConfig, *, rank: int, targets: Sequence[str]) -> list[Entry]:
    """The map of the adapters: two entries for each target, in the model's order.

    Args:
        config: of the base model.
        rank: r.
        targets: matrices of a layer that have an adapter, such as "q" and "down".
    """
    sizes = {**axis_sizes(config), "r": rank}
    return [entry(row, sizes) for row in adapter_rows(config, targets)]


def write_adapter(
    out_dir: Path,
    leaves: Mapping[LeafPath, np.ndarray],
    config: ModelConfig,
    *,
    lora: Lora,
    base_model: str,
) -> None:
    """Writes a PEFT directory, which appears by one rename.

    Args:
        out_dir: must not exist.
        leaves: every leaf of `adapter_map` by its path, float32.
        config: of the base.
        lora: rank, scale and matrices of the adapters.
        base_model: where PEFT will look for the base: a repository or a directory.

    Raises:
        UserError: `out_dir` exists, or cannot be written.
    """
    entries = adapter_map(config, rank=lora.rank, targets=lora.targets)
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({leaf.hf_name.rsplit(".", 3)[1] for leaf in entries}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with output_directory(out_dir) as folder:
        write_leaves(folder / WEIGHTS_NAME, entries, leaves)
        (folder / CONFIG_NAME).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
