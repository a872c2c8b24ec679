"""Layout of a run directory: paths of its database, versions, full states and rollouts."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import digest_file
from runspec.core.files import (
    Folder,
    ObjectPath,
    folder_at,
    last_file,
    read_object,
    remove_leftovers,
)
from runspec.core.schema import RunSpec

METRICS_FILE = "metrics.jsonl"
"""A line a trained step; the learner writes it."""
SAMPLES_FILE = "samples.jsonl"
"""A few rollouts of each step."""
FINGERPRINTS_FILE = "fingerprints.jsonl"
"""In checkpoints/: on what each policy version was made."""
STATE_FILE = "state.db"
"""SQLite database of the coordinator's ledger and the supervisor's tables."""
PARAMS_NAME = "params"
"""The Orbax checkpoint in v<N>/."""
PROBE_FILE = "probe.json"
"""Beside it: log-probs of fixed tokens, which a sampler compares with its engine after a load."""

FOLDERS = ("keys", "logs", "checkpoints", "weights", "store", "rollouts", "work")
"""Folders of a run directory that roles write to."""
ARRAYS_NAME = "state"
"""Folder of the arrays of a full state, in step_<N>/."""
BESIDE_NAME = "beside"
"""Folder beside it, of arrays that are no part of the training state (of learner islands)."""
SENT_NAME = "sent_params"
"""Array in that folder where the step's shares were not settled."""
ISLANDS_NAME = "islands"
"""Folder in `checkpoints.dir` of the islands after the first, which have a folder each."""
EVALUATIONS_NAME = "evaluations"
"""Folder of the evaluator's results, <evaluation>/v<N>.json."""
FINDINGS_NAME = "findings"
"""Folder of what watchers found, FIRST-LAST-KEY.json."""
MONITORS_NAME = "monitors"
"""Folder of the monitors, which have a folder each; a rollback keeps it."""
RECORD_NAME = "state.json"
"""Record of a full state, in step_<N>/; it is written last."""
MAX_RECORD_BYTES = 64 * 1024 * 1024
_CHECKED_WHEN_READ = "crc32c"
"""Digest of an object in a store: its chunks hold checksums, which are verified at every read."""


def initial_model(run_dir: Path) -> Path:
    """Return the Hugging Face directory of the starting model."""
    return run_dir / "initial"


def island_folder(run_dir: Path, role: str) -> Path:
    """Return what an island after the first has for a run directory.

    Args:
        run_dir: of the run, or the folder that the island has on its own machine.
        role: the island's group of processes, `island-<name>`.
    """
    return run_dir / "work" / role


def outer_folder(island: Path) -> Path:
    """Return the folder in which `island_folder` made an island's."""
    return island.parent.parent


def warm_start_cache(run_dir: Path) -> Path:
    """Return the cache of warm starts, beside the runs: a second run reuses the first one's."""
    return run_dir.parent.parent / ".cache" / "warm_start"


def corpus_cache(run_dir: Path) -> Path:
    """Return the cache of tokenized documents, beside the runs, which share it."""
    return run_dir.parent.parent / ".cache" / "corpus"


def checkpoints_folder(run_dir: Path, spec: RunSpec, island: str | None = None) -> Folder:
    """Return the folder that every process of a learner writes to: `checkpoints.dir` if set.

    Args:
        run_dir: of the run, or an island's own folder.
        spec: of the run.
        island: name of an island after the first; None for the learner of the run directory.
    """
    if spec.checkpoints.dir is None:
        return run_dir / "checkpoints"
    folder = folder_at(spec.checkpoints.dir) / spec.name
    return folder if island is None else folder / ISLANDS_NAME / island


def params_folder(run_dir: Path, spec: RunSpec, island: str | None = None) -> Folder:
    """Return the folder of v<N>/: Orbax parameters of version N, until they are published."""
    return checkpoints_folder(run_dir, spec, island) / "params"


def state_folder(run_dir: Path, spec: RunSpec, island: str | None = None) -> Folder:
    """Return the folder of step_<N>/: the full training state after N steps."""
    return checkpoints_folder(run_dir, spec, island) / "state"


def weights_folder(run_dir: Path) -> Path:
    """Return the folder of v<N>/: the safetensors directory of version N."""
    return run_dir / "weights"


def published_manifest(run_dir: Path, version: int) -> Path:
    """Return the signed manifest of a policy version, kept until a full state is published."""
    return run_dir / "checkpoints" / "versions" / f"v{version}.json"


def published_manifests(run_dir: Path) -> list[int]:
    """Return the versions that `published_manifest` has, in order."""
    paths = (run_dir / "checkpoints" / "versions").glob("v*.json")
    return sorted(int(path.stem[1:]) for path in paths if path.stem[1:].isdecimal())


def evaluation_file(run_dir: Path, evaluation: str, version: int) -> Path:
    """Return the file of the result of an evaluation of a version."""
    return run_dir / EVALUATIONS_NAME / evaluation / f"v{version}.json"


def evaluation_files(run_dir: Path) -> list[Path]:
    """Return the files of all results, by evaluation and version."""
    return [path for path, _ in evaluated_versions(run_dir)]


def evaluated_versions(run_dir: Path) -> list[tuple[Path, int]]:
    """Return `evaluation_files`, each with its version."""
    found = []
    for path in (run_dir / EVALUATIONS_NAME).glob("*/v*.json"):
        if match := re.fullmatch(r"v(\d+)\.json", path.name):
            found.append((path.parent.name, int(match[1]), path))
    return [(path, version) for _, version, path in sorted(found)]


def monitor_folder(run_dir: Path, name: str) -> Path:
    """Return the folder of a monitor: its journal, and the tool's files unless `dir` is set."""
    return run_dir / MONITORS_NAME / name


def versions_in(folder: Folder) -> list[int]:
    """Return the N of the directories v<N>, in order; empty if the folder is missing."""
    return numbered(folder, "v")


def numbered(folder: Folder, prefix: str) -> list[int]:
    """Return the N of the entries <prefix><N>, in order; in an object store the complete ones."""
    if isinstance(folder, ObjectPath):
        names = folder.entries()
    else:
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    matches = (re.fullmatch(rf"{prefix}(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def clear_unfinished(folder: Folder, log: logging.Logger) -> None:
    """Remove and log what a killed process did not finish writing."""
    if isinstance(folder, ObjectPath):
        for name in folder.unfinished():
            log.info("%s was never finished: removed", folder / name)
            (folder / name).remove()
        return
    for entry in sorted(folder.glob(".tmp-*")):
        log.info("%s was never finished: removed", entry)
    remove_leftovers(folder)


def remove_entry(path: Folder) -> None:
    """Remove a version or a full state.

    An interrupted removal leaves nothing that looks like a complete entry.
    """
    if isinstance(path, ObjectPath):
        path.remove()
        return
    doomed = path.with_name(f".tmp-removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    # A learner that starts meanwhile removes leftovers from the same folder.
    shutil.rmtree(doomed, ignore_errors=True)


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step}"


@dataclass(frozen=True)
class SubmissionFiles:
    """The four files of one submission."""

    submission: Path
    submission_envelope: Path
    verdict: Path
    verdict_envelope: Path


def submission_files(run_dir: Path, step: int, submission: str) -> SubmissionFiles:
    """Return the paths for a submission digest, which the caller has checked."""
    folder = step_folder(run_dir, step)
    return SubmissionFiles(
        folder / f"{submission}.safetensors",
        folder / f"{submission}.json",
        folder / f"{submission}.verdict.safetensors",
        folder / f"{submission}.verdict.json",
    )


def record_of(state: Folder) -> dict[str, Any]:
    """Read the record of a full state.

    Args:
        state: its folder, step_<N>.

    Raises:
        OSError, MalformedJson: the record is missing or is not a JSON object.
    """
    return read_object(last_file(state, RECORD_NAME), MAX_RECORD_BYTES)


def file_digests(state: Folder) -> dict[str, str]:
    """Return the BLAKE3 digests of the arrays' files by name; on a disk it reads all of them.

    Names are relative to the folder `state`; those of files in `beside` begin with its name.
    """
    found: dict[str, str] = {}
    for name, prefix in ((ARRAYS_NAME, ""), (BESIDE_NAME, f"{BESIDE_NAME}/")):
        root = state / name
        if isinstance(root, ObjectPath):
            found |= {f"{prefix}{key}": _CHECKED_WHEN_READ for key in sorted(root.names())}
        else:
            paths = sorted(path for path in root.rglob("*") if path.is_file())
            names = (f"{prefix}{path.relative_to(root).as_posix()}" for path in paths)
            found |= dict(zip(names, map(digest_file, paths), strict=True))
    return found


def damaged_file(state: Folder, files: Mapping[str, str]) -> str | None:
    """Return the name of a file of a full state that is missing or changed; None if all match."""
    found = file_digests(state)
    names = (name for name in sorted({*found, *files}) if found.get(name) != files.get(name))
    return next(names, None)
