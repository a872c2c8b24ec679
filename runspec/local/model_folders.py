"""Folders of a run's models and training states: the starting model, the trained one, full states,
and the export of a version with a model card.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broadcast.layout import TENSORS_NAME, manifest_name, stored_versions
from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from runspec.core import run_files
from runspec.core.canonical import MalformedJson, digest_bytes
from runspec.core.errors import UserError, reported
from runspec.core.files import Folder, new_directory, read_bounded
from runspec.core.models import CLASS_NAME, TOKENIZER_NAMES
from runspec.core.models.family import load_config
from runspec.core.process import root_public_key
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature
from runspec.lint import TokenizerFiles
from runspec.lint.rules.data import opens_thinking
from runspec.local.diagnosis import result_line, results_of
from runspec.local.identity import load_roles
from runspec.local.metrics import read_rows
from verify.formats.documents import Evaluated


def link_model(initial: Path, model: Path, tokenizer: Path | None) -> None:
    """Makes `initial/`, in place of one that was left unfinished or lost its files.

    Args:
        initial: what is made.
        model: directory with config.json and safetensors.
        tokenizer: directory whose tokenizer and chat template are taken; None: the model's own.

    Raises:
        UserError: the tokenizer knows tokens that the model has no rows for.
    """
    if initial.is_symlink():
        initial.unlink()
    elif initial.exists():
        shutil.rmtree(initial)
    if tokenizer is None:
        initial.symlink_to(model)
        return
    require_fitting(tokenizer, model)
    present = (path for path in model.iterdir() if path.is_file())  # of a version, no delta/
    files = {path.name: path for path in present if path.name not in TOKENIZER_NAMES}
    named = (tokenizer / name for name in TOKENIZER_NAMES)
    files |= {path.name: path for path in named if path.is_file()}
    with new_directory(initial) as folder:
        for name, path in files.items():
            (folder / name).symlink_to(path.resolve())


def link_tokenizer(initial: Path, tokenizer: Path) -> None:
    """Makes `initial/` with the files of a tokenizer alone, to which the weights are added."""
    initial.mkdir(exist_ok=True)
    for name in TOKENIZER_NAMES:
        if (tokenizer / name).is_file() and not (initial / name).is_symlink():
            (initial / name).symlink_to((tokenizer / name).resolve())


def require_fitting(tokenizer: Path, model: Path) -> None:
    """Raises UserError where the tokenizer's largest token id is beyond the model's vocabulary."""
    place, files = str(tokenizer / "tokenizer.json"), TokenizerFiles.read(tokenizer)
    if files is None or not files.ids:
        raise UserError("not a tokenizer", place=place, remedy="a tokenizer.json is needed")
    largest, rows = max(files.ids.values()), load_config(model).vocab_size
    if largest >= rows:
        raise UserError(
            f"its largest token id is {largest}, the model's vocabulary has {rows} rows",
            place=place,
            remedy="model.tokenizer must be of the model's vocabulary",
        )


def trained_model(run_dir: Path, spec: RunSpec) -> list[str]:
    """Return lines on the newest published version after 0: its Hugging Face directory, what it
    lacks, and a line of Python for transformers and for vLLM. Empty where none is published."""
    published = stored_versions(run_dir / "store" / "origin", spec.name)
    version = max(
        {*published} & {*run_files.versions_in(run_files.weights_folder(run_dir))}, default=0
    )
    if version == 0:
        return []
    folder = run_files.weights_folder(run_dir) / f"v{version}"
    which = "the last" if version == spec.steps else f"the newest published of {spec.steps}"
    place = json.dumps(str(folder))
    loader = tokenizer_loader(folder)
    by_ids = "" if loader == "AutoTokenizer" else ", skip_tokenizer_init=True"
    return [
        f"version {version}, {which}, as a Hugging Face directory: {folder}",
        *_lacking(folder),
        f"transformers: {'; '.join(_loading(loader, place))}",
        f"vLLM: from vllm import LLM; model = LLM({place}{by_ids})",
    ]


def tokenizer_loader(folder: Path) -> str:
    """Return the class of transformers that reads the tokenizer of a directory as it stands.

    AutoTokenizer and vLLM take a tokenizer of their own for some families (`CLASS_NAME`), unless
    the directory names a class. That is missing where an older version of runspec or a person
    made the tokenizer.
    """
    files = TokenizerFiles.read(folder)
    said = files and files.config.get("tokenizer_class")
    if said not in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        return "AutoTokenizer"
    return "AutoTokenizer" if (folder / CLASS_NAME).is_file() else "PreTrainedTokenizerFast"


def _loading(loader: str, place: str) -> list[str]:
    """Return lines of Python that load tokenizer and model from a place, a literal of Python."""
    return [
        f"from transformers import AutoModelForCausalLM, {loader}",
        f"tokenizer = {loader}.from_pretrained({place})",
        f"model = AutoModelForCausalLM.from_pretrained({place})",
    ]


def _usage(spec: RunSpec, folder: Path) -> Iterator[str]:
    """Yield lines of Python that load the model in this folder and ask it in the run's own form."""
    yield from _loading(tokenizer_loader(folder), '"."')
    files = TokenizerFiles.read(folder)
    target = next((length for term in spec.reward for length in term.targets or ()), None)
    if files is not None and files.has_template:
        yield f"messages = {spec.data.prompt_messages('Your question', target)!r}"
        how = "messages, tokenize=False, add_generation_prompt=True"
        yield f"text = tokenizer.apply_chat_template({how})"
        if spec.data.think_prefill and not opens_thinking(files):
            yield 'text += "<think>\\n"'
    else:
        yield 'text = "Your text"'
    yield 'ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]'
    longest = max((pool.max_new_tokens for pool in spec.samplers), default=64)
    yield f"output = model.generate(ids, max_new_tokens={longest})"
    yield "print(tokenizer.decode(output[0]))"


def _lacking(folder: Path) -> Iterator[str]:
    """Yields a line for each part that the directory lacks."""
    from bridge.safetensors_io import read_headers  # draws numpy

    try:
        read_headers(folder)
    except UserError as error:
        yield f"it is damaged: {error.place}: {error.thing}"
    if not (folder / "config.json").is_file():
        yield "it has no config.json"
    tokenizer = TokenizerFiles.read(folder)
    if tokenizer is None:
        yield "it has no tokenizer.json"
    elif not tokenizer.has_template:
        yield "it has no chat template, as the model that it started from"


@dataclass(frozen=True)
class FullState:
    """checkpoints/state/step_<N>: the training state after N steps."""

    step: int
    path: Folder

    @property
    def bytes(self) -> int | None:
        """Bytes of all its files; None in an object store."""
        return folder_bytes(self.path) if isinstance(self.path, Path) else None

    def is_committed(self) -> bool:
        """Return whether it holds the version of its number.

        It does not where an island wrote it before the step's record came. An unreadable one counts
        as committed: `require_whole` says what is wrong.
        """
        try:
            beside = run_files.record_of(self.path).get("beside")
        except (OSError, MalformedJson):
            return True
        return not (isinstance(beside, Mapping) and run_files.SENT_NAME in beside)

    def require_whole(self) -> None:
        """Compares every file with the digests in state.json, as the learner will.

        Raises:
            UserError: one is missing or damaged.
        """
        place = str(self.path)
        with reported("unreadable full state", place, "", OSError, MalformedJson):
            files: Any = run_files.record_of(self.path).get("files")
        if not isinstance(files, Mapping):
            raise UserError("unreadable full state: no list of files", place=place)
        if (name := run_files.damaged_file(self.path, files)) is not None:
            raise UserError(f"{name} is missing or not what was written", place=place)


def full_states(run_dir: Path, spec: RunSpec) -> list[FullState]:
    """Return the full states in the folder, in order."""
    folder = run_files.state_folder(run_dir, spec)
    return [
        FullState(step, folder / f"step_{step}") for step in run_files.numbered(folder, "step_")
    ]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; links are not followed, and count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


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
    from bridge.model_files import CARD_NAME, ROLES_NAME, require_published  # draws numpy

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
            digest = digest_bytes(found.signed)
            card = model_card(spec, found.manifest, digest, root, results, _usage(spec, new))
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
    here = run_files.versions_in(run_files.weights_folder(run_dir))
    if not here or (version is not None and version not in here):
        wanted = "a version" if version is None else f"version {version}"
        raise UserError(
            f"{wanted} is not here; there are: {', '.join(map(str, here)) or 'none'}",
            place=str(run_files.weights_folder(run_dir)),
            remedy="broadcast.keep_versions says how many stay",
        )
    version = here[-1] if version is None else version
    stored = run_dir / "store" / "origin" / manifest_name(spec.name, version)
    roles = load_roles(run_dir, spec)
    thing = f"version {version} cannot be believed"
    with reported(thing, stored, "name another version", OSError, BadSignature):
        data = read_bounded(stored, MAX_BYTES)
        manifest = open_manifest(data, run=spec.name, publishers=roles.publisher)
    return Published(run_files.weights_folder(run_dir) / f"v{version}", manifest, data)


def model_card(
    spec: RunSpec,
    manifest: WeightsManifest,
    manifest_digest: str,
    root: str,
    results: Sequence[Evaluated],
    usage: Iterable[str],
) -> str:
    """Return the model card: Markdown with the metadata of the Hugging Face hub in front.

    Args:
        spec: of the run.
        manifest: of the version.
        manifest_digest: BLAKE3 of the signed manifest.
        root: the run's root public key.
        results: evaluations of the version.
        usage: lines of Python that load it and ask it.
    """
    meta: dict[str, Any] = {"tags": ["runspec", spec.algorithm.kind]}
    if spec.model.hf is not None:
        meta["base_model"] = spec.model.hf
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in meta.items()), "---", ""]
    lines += [f"# {spec.name}, version {manifest.version} of {spec.steps}", ""]
    lines += ["## How to use", "", "In this folder, with transformers and torch:", ""]
    lines += [*(f"    {line}" for line in usage), ""]
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
