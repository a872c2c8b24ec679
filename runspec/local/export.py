"""Exports a published version: a Hugging Face directory with a model card, and its signatures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broadcast.layout import manifest_name
from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from broadcast.store import TENSORS_NAME
from runspec.core.errors import UserError
from runspec.core.files import new_directory, read_bounded
from runspec.core.hashing import digest_bytes
from runspec.core.run_files import versions_in, weights_folder
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec
from runspec.local.evaluations import result_line, results_of
from runspec.local.identity import load_roles, root_public_key
from runspec.local.metrics import read_rows
from verify.formats.evaluation import Evaluated


def export_version(run_dir: Path, spec: RunSpec, version: int | None, out: Path) -> int:
    """Export a version, checked against its signed manifest.

    Args:
        run_dir: of the run.
        spec: its resolved spec.
        version: None takes the newest that is here.
        out: must not exist; it appears whole or not at all.

    Returns:
        The version.

    Raises:
        UserError: the version is not here or damaged, or `out` exists or cannot be written.
    """
    from bridge.published import CARD_NAME, ROLES_NAME, require_published  # draws numpy

    found = published_version(run_dir, spec, version)
    known = results_of(run_dir, read_rows(run_dir))
    results = [each for each in known if each.version == found.manifest.version]
    try:
        with new_directory(out) as new:
            for path in found.folder.iterdir():
                if path.is_file() and path.name != TENSORS_NAME:
                    shutil.copyfile(path, new / path.name)
            require_published(new, found.manifest)
            (new / FILE_NAME).write_bytes(found.signed)
            shutil.copyfile(run_dir / "keys" / "roles.json", new / ROLES_NAME)
            root = root_public_key(run_dir, spec)
            card = model_card(spec, found.manifest, digest_bytes(found.signed), root, results)
            (new / CARD_NAME).write_text(card, encoding="utf-8")
    except OSError as error:
        taken = isinstance(error, FileExistsError)
        raise UserError(
            "exists already" if taken else f"cannot be written: {error.strerror}",
            place=str(out),
            remedy="name a new folder" if taken else "free disk space or mend the permissions",
        ) from error
    return found.manifest.version


@dataclass(frozen=True)
class Published:
    """A published version whose weights are in the run directory."""

    folder: Path
    """Its Hugging Face directory, whose files were not compared with the manifest yet."""
    manifest: WeightsManifest
    signed: bytes
    """The manifest as it was signed."""


def published_version(run_dir: Path, spec: RunSpec, version: int | None) -> Published:
    """Return a version of a run, and the manifest that its publisher signed.

    Args:
        run_dir: of the run.
        spec: its resolved spec.
        version: None takes the newest that is here.

    Raises:
        UserError: the version is not here, or its manifest cannot be believed.
    """
    version = _chosen(run_dir, version)
    stored = run_dir / "store" / "origin" / manifest_name(spec.name, version)
    roles = load_roles(run_dir, spec)
    try:
        data = read_bounded(stored, MAX_BYTES)
        manifest = open_manifest(data, run=spec.name, publishers=roles.publisher)
    except (OSError, BadSignature) as error:
        raise UserError(
            f"version {version} cannot be believed: {error}",
            place=str(stored),
            remedy="name another version",
        ) from error
    return Published(weights_folder(run_dir) / f"v{version}", manifest, data)


def _chosen(run_dir: Path, version: int | None) -> int:
    here = versions_in(weights_folder(run_dir))
    if not here or (version is not None and version not in here):
        wanted = "a version" if version is None else f"version {version}"
        raise UserError(
            f"{wanted} is not here; there are: {', '.join(map(str, here)) or 'none'}",
            place=str(weights_folder(run_dir)),
            remedy="broadcast.keep_versions says how many stay",
        )
    return here[-1] if version is None else version


def model_card(
    spec: RunSpec,
    manifest: WeightsManifest,
    manifest_digest: str,
    root: str,
    results: Sequence[Evaluated],
) -> str:
    """Return the model card: Markdown with the metadata of the Hugging Face hub in front.

    Args:
        spec: of the run.
        manifest: of the version.
        manifest_digest: BLAKE3 of the signed manifest.
        root: the run's root public key.
        results: evaluations of the version.
    """
    meta: dict[str, Any] = {"tags": ["runspec", spec.algorithm.kind]}
    if spec.model.hf is not None:
        meta["base_model"] = spec.model.hf
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in meta.items()), "---", ""]
    lines += [f"# {spec.name}, version {manifest.version} of {spec.steps}", ""]
    lines += _section("Recipe", _recipe(spec))
    lines += _section("Data", _data(spec))
    found = {result.evaluation: result_line(result) for result in results}
    lines += _section("Evaluations", found or {"none": "of this version"})
    lines += _section(
        "Digests",
        {
            "model": f"`{manifest.model_digest}`, BLAKE3 of the tensors' digests",
            "manifest": f"`{manifest_digest}`, BLAKE3 of `{FILE_NAME}`",
            "root key": f"`{root}`",
        },
    )
    check = f"python -m bridge check . --run {spec.name} --public-key {root}"
    lines += ["## How to verify", "", "In this folder, with runspec installed:", ""]
    lines += [f"    {check}", ""]
    lines += [
        "It checks that the root key signed `roles.json`, that a publisher named there signed",
        f"`{FILE_NAME}`, and that every file has its digest. Compare the root key with the one",
        "that the run's owner publishes elsewhere.",
        "",
    ]
    return "\n".join(lines)


def _section(title: str, pairs: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    for name, text in pairs.items():
        yield f"- {name}: {text}"
    yield ""


def _recipe(spec: RunSpec) -> dict[str, str]:
    found: dict[str, str] = {"kind": spec.algorithm.kind}
    if spec.model.hf is not None:
        found["starting model"] = f"{spec.model.hf} at {spec.model.revision or 'no revision'}"
    elif spec.model.shape is not None:
        found["starting model"] = f"a new {spec.model.shape.model_type}"
    algorithm = spec.algorithm.model_dump(mode="json", exclude_none=True)
    for name, value in algorithm.items():
        if name != "kind":
            found[f"algorithm.{name}"] = f"`{json.dumps(value)}`"
    optimizer = spec.optimizer.model_dump(mode="json", exclude_none=True)
    found["optimizer"] = f"`{json.dumps(optimizer)}`"
    for term in spec.reward:
        found[f"reward {term.name}"] = f"`{json.dumps(term.model_dump(exclude_none=True))}`"
    return found


def _data(spec: RunSpec) -> dict[str, str]:
    found = {}
    for source in spec.data.sources:
        shown = {"kind": source.kind, "dataset": source.dataset, "revision": source.revision}
        if source.uri is not None:  # a folder of this machine is nobody else's business
            shown["uri"] = Path(source.uri).name if Path(source.uri).is_absolute() else source.uri
        if not source.train:
            shown["use"] = "asked in evaluations only"
        found[source.name] = ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None)
    return found
