"""Sources of a spec: local files in reading order, the digest of their contents, and parameters.

The linter, the coordinator that sends the files to volunteers, and the sources themselves use these
functions, so that all agree on the files and their order. Nothing here reads rows or documents.

Plug-ins that a spec needs are found by entry-point metadata: no plug-in is imported.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import has_magic
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from runspec.core.canonical import digest_file, hash_parts
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.files import expand_user, read_json
from runspec.core.schema import RunSpec, Source

MAX_FILES = 65_536
"""Most files that one source may read."""
SUFFIXES = {
    **dict.fromkeys(("jsonl", "gsm8k", "livecodebench"), ".jsonl"),
    "parquet": ".parquet",
}
"""Suffix of the files that a kind reads in a folder. If no file has it, all are read."""
ROW_KINDS = frozenset({*SUFFIXES, "hf_dataset"})
"""Built-in kinds that read rows from files."""
_MAX_STATE_BYTES = 16 * 1024 * 1024
_HUB = "hf://datasets/"
EXECUTING_KINDS = ("code", "python")
"""Kinds that execute what the model wrote."""
PYTHON = "{}.{}".format(*sys.version_info)
"""Version whose arithmetic, texts and chance an environment's code has."""


def source_files(source: Source, data_dir: Path | None = None) -> dict[str, Path]:
    """Return the files of a source by relative POSIX name, in reading order.

    Args:
        source: its relative paths start from the working directory.
        data_dir: folder with the files of all sources, as <source>/<relative name>; it replaces
            the source's `uri`.

    Returns:
        Resolved paths of regular files; names hold no `..`. Empty for a source without `uri`.

    Raises:
        UserError: a file is missing or not a regular file, or the uri is not of this machine.
    """
    if source.uri is None:
        return {}
    local = redirected(source, data_dir)
    if local.kind == "hf_dataset":
        return _dataset_files(local)
    assert local.uri is not None
    place = _place(local)
    root, names = _named(local.uri, place)
    of_kind = [name for name in names if name.endswith(SUFFIXES.get(local.kind, ""))] or names
    if root != Path(local.uri) and len(of_kind) < len(names):
        other = next(name for name in names if name not in of_kind)
        raise UserError(
            f"{local.uri} matches {of_kind[0]} and {other}: of a folder with both, such as a "
            "volunteer's copy, only the first is read",
            place=place,
            remedy="narrow the pattern",
        )
    names = of_kind
    return {name: _regular(root / name, place) for name in sorted(names)}


def whole_uri(uri: str, folder: Path) -> str:
    """Return the absolute path of a local uri; any other uri unchanged.

    Args:
        uri: uri of a source. A relative path starts from the spec's folder or, if nothing is
            there, from the working directory.
        folder: folder of the spec's file.
    """
    if "://" in uri:
        return uri
    path = expand_user(Path(uri))
    try:
        beside = folder / path
        return str((path if path.exists() and not beside.exists() else beside).absolute())
    except (OSError, ValueError):  # an invalid path
        return uri


def redirected(source: Source, data_dir: Path | None) -> Source:
    """Return the source with its files in `data_dir`, if one is given and it reads files."""
    if data_dir is None or source.uri is None:
        return source
    return source.model_copy(update={"uri": str(data_dir / source.name)})


def data_digest(spec: RunSpec, data_dir: Path | None = None) -> str:
    """Return BLAKE3 over file contents in order, versions of generators, and the code of
    environments with the version of Python, or with its build where it runs the model's programs.

    Equal digests, with the same spec and tokenizer, mean the same problems.

    Raises:
        UserError: see `source_files`.
    """
    parts: list[str] = ["data"]
    for source in spec.data.sources:
        files = row_files(source, source_files(source, data_dir))
        digests = [file_digest(path) for path in files.values()]
        made_by = [] if digests else [_generator(source.kind)]
        parts += [source.name, str(len(digests)), *digests, *made_by]
    for point in entry_points_of(ENVIRONMENT_GROUP):
        if point.name in {reward.kind for reward in spec.reward}:
            version = sys.version if point.name in EXECUTING_KINDS else PYTHON
            parts += [point.name, version, *map(file_digest, _code_of(point.module))]
    return hash_parts(*parts).hex()


def _code_of(module: str) -> list[Path]:
    """Return the Python files of a plug-in's folder, or its file where that is no package; the
    plug-in is not imported.

    Raises:
        UserError: there is no such module.
    """
    found = find_spec(module)
    if found is None or found.origin is None:
        raise UserError(
            f"no module {module}, which an environment is in",
            place="reward",
            remedy="install the package that offers it again",
        )
    file = Path(found.origin)
    packaged = (file.parent / "__init__.py").exists()
    return sorted(file.parent.glob("*.py")) if packaged else [file]


def compare_data_digests(ours: str, theirs: str, *, whose: str) -> None:
    """Require that another process has the same data.

    Args:
        ours: `data_digest` of this process.
        theirs: `data_digest` of the other process.
        whose: name of the other process, for the message.

    Raises:
        UserError: they differ.
    """
    if ours != theirs:
        raise UserError(
            f"the problems of {whose} are made from other data ({theirs[:12]}) than ours "
            f"({ours[:12]}): a lease would mean other problems there",
            place="data.sources",
            remedy="give both the same files, and the same version of every generator's package",
        )


def row_files(source: Source, files: dict[str, Path]) -> dict[str, Path]:
    """Return a source's files that hold rows: all but the index of a `hf_dataset`."""
    if source.kind != "hf_dataset":
        return files
    return {name: path for name, path in files.items() if not name.endswith(".json")}


def file_digest(path: Path) -> str:
    """Return BLAKE3 of a file; it is cached until the file's size or time changes."""
    known = path.stat()
    return _digest(path, known.st_size, known.st_mtime_ns)


@lru_cache(MAX_FILES)
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    return digest_file(path)


def _place(source: Source) -> str:
    return f"data.sources.{source.name}.uri"


def _named(uri: str, place: str) -> tuple[Path, list[str]]:
    """Return the base folder of a uri, and the names of its files below it."""
    if "://" in uri:
        raise _elsewhere(uri, place)
    path = Path(uri)
    if path.is_dir():
        return path, _walk(path, place)
    if path.exists() or not has_magic(uri):
        return path.parent, [path.name]
    fixed = next(i for i, part in enumerate(path.parts) if has_magic(part))
    pattern = path.parts[fixed:]
    if ".." in pattern or "**" in pattern:
        raise UserError(
            f"{uri}: a pattern has neither `**` nor `..` behind its first wildcard",
            place=place,
            remedy="name a folder to read all that lies below it",
        )
    root = Path(*path.parts[:fixed])
    matched = (path for path in root.glob(str(Path(*pattern))) if not path.is_dir())
    names = [path.relative_to(root) for path in matched]
    seen = [name.as_posix() for name in names if not any(p.startswith(".") for p in name.parts)]
    return root, _bounded(sorted(seen), uri, place)


def _walk(folder: Path, place: str) -> list[str]:
    """Return the names of all files below a folder, without hidden ones and linked folders."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = Path(parent).relative_to(folder)
        names += [(below / name).as_posix() for name in files if not name.startswith(".")]
        if len(names) > MAX_FILES:
            break
    return _bounded(sorted(names), str(folder), place)


def _bounded(names: list[str], what: str, place: str) -> list[str]:
    if not names:
        raise UserError(
            f"{what}: no file is there", place=place, remedy="name a file, or a folder that has any"
        )
    if len(names) > MAX_FILES:
        raise UserError(f"{what}: more than {MAX_FILES} files", place=place)
    return names


def _regular(path: Path, place: str) -> Path:
    """Return the file behind symbolic links; it must be regular, since a pipe would block."""
    try:
        resolved = path.resolve(strict=True)
        if stat.S_ISREG(resolved.stat().st_mode):
            return resolved
        reason = "no plain file"
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise UserError(
        f"cannot read {path}: {reason}",
        place=place,
        remedy="name files that are on this machine; a relative path starts from the spec's folder",
    )


def _elsewhere(uri: str, place: str) -> UserError:
    setting = f"--set {place}=DIR"
    if uri.startswith(_HUB):
        repository = "/".join(uri.removeprefix(_HUB).split("/")[:2])
        command = f"hf download --repo-type dataset {repository} --local-dir DIR"
        remedy = f"`{command}`, then {setting}"
    else:
        remedy = f"fetch it once, then {setting} or the file's path"
    return UserError(f"{uri} is not on this machine", place=place, remedy=remedy)


def _dataset_files(source: Source) -> dict[str, Path]:
    """Return state.json and the Arrow files that it lists, of the split `params.split`."""
    assert source.uri is not None
    place = _place(source)
    if "://" in source.uri:
        raise _elsewhere(source.uri, place)
    root, folder, files = Path(source.uri), PurePosixPath(), {}
    split = source.params.get("split")
    if (root / "dataset_dict.json").exists():
        files["dataset_dict.json"] = _regular(root / "dataset_dict.json", place)
        splits = read_json(
            files["dataset_dict.json"], _MAX_STATE_BYTES, "the list of splits", place=place
        ).get("splits")
        if not isinstance(splits, list) or split not in splits:
            raise UserError(
                f"{root} holds the splits {splits}, and split is {split!r}",
                place=f"data.sources.{source.name}.params",
                remedy="name one of them, such as params: {split: train}",
            )
        folder = PurePosixPath(str(split))
    elif split is not None:
        raise UserError(
            f"{root} is one split already (it has no dataset_dict.json)",
            place=f"data.sources.{source.name}.params.split",
            remedy="leave split out, or name the folder above",
        )
    state = str(folder / "state.json")
    files[state] = _regular(root / state, place)
    said = read_json(files[state], _MAX_STATE_BYTES, "the list of files", place=place)
    if said.get("_indices_data_files"):
        raise UserError(
            f"{root / state} keeps a selection of rows beside them",
            place=place,
            remedy="write it with `Dataset.flatten_indices().save_to_disk`",
        )
    listed = said.get("_data_files")
    for entry in listed if isinstance(listed, list) else []:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or PurePosixPath(name).name != name:
            raise UserError(f"{root / state} lists {str(name)[:80]!r}, no file name", place=place)
        files[str(folder / name)] = _regular(root / folder / name, place)
    if not row_files(source, files):
        raise UserError(
            f"{root / state} lists no data files",
            place=place,
            remedy="name a folder that `datasets` wrote with `save_to_disk`",
        )
    return files


def _generator(kind: str) -> str:
    """Return name and version of the package that makes the problems of a kind without files."""
    try:
        if kind == "reasoning_gym":
            return f"reasoning_gym {version('reasoning_gym')}"
    except PackageNotFoundError:
        return kind
    points = [point for point in entry_points_of(SOURCE_GROUP) if point.name == kind]
    made_by = points[0].dist if points else None
    return kind if made_by is None else f"{made_by.name} {made_by.version}"


COLUMNS = ("text", "messages", "tokens")
"""Parameters that name the column of a row that is a document: text, a conversation, or token
ids."""
_ROW: dict[str, type] = {**dict.fromkeys(COLUMNS, str), "id_offset": int}
GENERATED: dict[str, type] = dict.fromkeys(("organisms", "reads", "length", "seed"), int)
"""Parameters of `generated_reads`, which reads no file."""
PARAMS: dict[str, dict[str, type]] = {
    "text": {"whole": bool},
    "jsonl": _ROW,
    "parquet": _ROW,
    "fasta": {},
    "fastq": {},
    "generated_reads": GENERATED,
}
"""Parameters by kind of source, and the type of each."""


def is_generated(source: Source) -> bool:
    """Return whether a source of documents reads no file."""
    return source.kind == "generated_reads"


def column_of(source: Source, kind: str) -> tuple[str, str]:
    """Return what a source's documents are, one of `COLUMNS`, and the column that holds them.

    Args:
        source: of documents; of kinds that have no columns the documents are text.
        kind: of the algorithm; rows without a named column are conversations for `sft`, else text.
    """
    named = next((key for key in COLUMNS if key in source.params), None)
    if named is not None:
        return named, str(source.params[named])
    rows = PARAMS.get(source.kind) is _ROW
    usual = "messages" if rows and kind == "sft" else "text"
    return usual, usual


SOURCE_GROUP = "runspec.sources"
REWARD_GROUP = "runspec.rewards"
ENVIRONMENT_GROUP = "runspec.environments"
"""Kinds of a reward too: those of several turns."""
PREFILL_GROUP = "runspec.prefill"
MONITOR_GROUP = "runspec.monitors"


def installed_kinds(group: str) -> list[str]:
    """Return the names that installed packages offer in an entry-point group."""
    return sorted({point.name for point in entry_points_of(group)})


@dataclass(frozen=True)
class MissingPlugin:
    """Kind of source, reward or monitor that no installed package offers."""

    location: tuple[str, ...]
    """Keys and name of the source, reward or monitor that needs it."""
    group: str
    """Entry-point group."""
    kind: str
    installed: Sequence[str]

    @property
    def path(self) -> str:
        return ".".join(self.location)

    @property
    def remedy(self) -> str:
        return f"install the package that offers it; installed: {', '.join(self.installed)}"

    def __str__(self) -> str:
        return f"no installed package offers the kind {self.kind!r} in {self.group}"


def plays_environments(spec: RunSpec) -> bool:
    """Whether rollouts may have several turns: a reward's kind is an environment's."""
    return not {reward.kind for reward in spec.reward}.isdisjoint(
        installed_kinds(ENVIRONMENT_GROUP)
    )


def missing_plugins(spec: RunSpec) -> list[MissingPlugin]:
    """Return sources of problems, rewards and monitors whose kind no installed package offers."""
    problems = spec.data.sources if spec.supervised is None else ()  # documents have no plug-ins
    asked: list[tuple[str, tuple[str, ...], str]] = [
        *((SOURCE_GROUP, ("data", "sources", s.name), s.kind) for s in problems),
        *((REWARD_GROUP, ("reward", r.name), r.kind) for r in spec.reward),
        *((MONITOR_GROUP, ("monitors", m.name), m.kind) for m in spec.monitors),
    ]
    offered = {group: installed_kinds(group) for group in dict.fromkeys(each[0] for each in asked)}
    if REWARD_GROUP in offered:
        offered[REWARD_GROUP] = sorted(
            {*offered[REWARD_GROUP], *installed_kinds(ENVIRONMENT_GROUP)}
        )
    return [
        MissingPlugin(location, group, kind, offered[group])
        for group, location, kind in asked
        if kind not in offered[group]
    ]
