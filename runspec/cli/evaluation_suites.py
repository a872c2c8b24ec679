"""Suites of `runspec evaluate`: shipped ones, files, and the rows of a file.

A suite is a YAML file with the spec's own blocks: `data.sources` with `train: false`, the terms of
`reward` that grade them, and `evaluations`. It goes over the run's spec, or over a bare one for a
directory that no run made.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from runspec.cli import serve
from runspec.cli.checks import located
from runspec.core.errors import BadUsage, UserError
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles, load_layers
from runspec.lint import Context, TokenizerFiles
from runspec.lint.rules.data import thinking_of
from runspec.lint.rules.samplers import evaluation_names

MAX_UNPACKED_BYTES = 8 * 1024**3
"""Most bytes that a file of problems may have when it is unpacked."""
_CHUNK_BYTES = 1024 * 1024
_OF_ROWS = (".jsonl", ".parquet", ".gz")
_SUITES = resources.files("runspec.cli") / "suites"
ROWS = "given-rows"
"""Name of the source and of the evaluation of rows that are given without a suite."""
_READ_AS_ROWS = ("jsonl", "parquet", "hf_dataset")


def bare_spec(weights: Path, length: int) -> dict[str, Any]:
    """Return what a spec must have besides a suite, for weights of so many positions."""
    pool, files = serve.bare_pool(length), TokenizerFiles.read(weights)
    thinking = (files and thinking_of(files)) or "required"
    return {
        "version": "runspec/v1",
        "name": "evaluated",
        "seed": 1,
        "steps": 1,
        "model": {"hf": str(weights), "max_context": length},
        "data": {"max_prompt_tokens": length - pool.max_new_tokens, "thinking": thinking},
        "optimizer": {"lr": 1.0},
        "learner": {"hardware": {"kind": "cpu"}, "packing": {"tokens": length, "rows": 1}},
        "samplers": [pool.model_dump(mode="json", exclude_none=True)],
    }


def suite_spec(
    base: Mapping[str, Any], suite: Path | None, overrides: Sequence[str], folder: Path
) -> RunSpec:
    """Return the spec of base and suite; relative files of a suite lie beside it.

    Raises:
        UserError: it has errors.
    """
    layers, top = [folder / "base.yaml"], folder / "evaluated.yaml"
    layers[0].write_text(json.dumps(base))  # JSON is YAML
    layers += [suite.absolute()] if suite is not None else []
    top.write_text(json.dumps({"extends": [str(layer) for layer in layers]}))
    files = SpecFiles(top, overrides=overrides)
    try:
        spec = load_layers(files).require()
    except UserError as error:  # the file on top, which nobody but us has written, lacks a key
        thing = error.thing.replace(str(top), str(suite or "the run"))
        raise UserError(thing, place=error.place, remedy=error.remedy) from error
    for violation in evaluation_names(Context(spec, files)):
        raise UserError(
            violation.message,
            place=f"{suite or 'the run'}: {'.'.join(map(str, violation.location))}",
            remedy=violation.suggestion,
        )
    return spec if suite is None else located(spec, suite.absolute().parent)


def rows_suite(base: Mapping[str, Any], data: Path, folder: Path) -> Path:
    """Write the suite that asks the rows of a file, and return its path.

    They have the form of the first source of the spec that reads files. Where none does, they have
    the columns of kind `jsonl`, and problems of mathematics are graded, too.

    Args:
        base: a spec.
        data: JSON Lines, also as .gz, or Parquet, or a folder.
        folder: gets the suite.

    Raises:
        UserError: there is no such file, or it cannot be unpacked.
    """
    if not data.exists():
        raise BadUsage(f"there is no {data}", place="--data", remedy="name a file of rows")
    files = (each for each in base["data"].get("sources", ()) if each.get("uri"))
    own: Mapping[str, Any] = next(files, {})
    source = {key: own[key] for key in ("kind", "params", "task_types") if key in own}
    if source.setdefault("kind", "jsonl") in _READ_AS_ROWS and data.is_file():
        source["kind"] = "parquet" if data.suffix == ".parquet" else "jsonl"
        source["params"] = {k: v for k, v in own.get("params", {}).items() if k != "split"}
    rows = _unpacked(data, folder) if data.suffix == ".gz" else data.absolute()
    source |= {"name": ROWS, "uri": str(rows), "train": False}
    suite: dict[str, Any] = {"data": {"sources": [source]}}
    suite["evaluations"] = [{"name": ROWS, "source": ROWS}]
    if not own and all(term["kind"] != "math" for term in base.get("reward", ())):
        suite["reward"] = [{"name": "math", "kind": "math"}]
    (path := folder / "rows.yaml").write_text(json.dumps(suite))
    return path


def shipped_names() -> list[str]:
    """Return the names of the shipped suites."""
    names = (entry.name for entry in _SUITES.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def named_suite(suite: str, data: Path | None, folder: Path) -> tuple[Path, Sequence[str]]:
    """Return the file of a suite, and the overrides that say where its problems are.

    Args:
        suite: name of a shipped suite, or a file.
        data: JSON Lines of a shipped suite's problems, also as .gz, or Parquet, or a folder.
        folder: gets files that are made for it.

    Raises:
        BadUsage: `data` is missing, or there although the suite is a file.
        UserError: `data` cannot be unpacked.
    """
    shipped = shipped_names()
    if suite not in shipped:
        known = f"the shipped ones are {', '.join(shipped)}"
        if data is not None:
            thing = "--data is of a shipped suite; a file of your own names its problems itself"
            raise BadUsage(thing, place=suite, remedy=known)
        if Path(suite).suffix in _OF_ROWS:
            remedy = f"--data {suite} without --suite"
            raise BadUsage("rows, not a suite", place=suite, remedy=remedy)
        if not Path(suite).is_file():
            raise BadUsage("no such file, and no shipped suite", place=suite, remedy=known)
        return Path(suite), ()
    if data is None or not data.exists():
        raise BadUsage(
            "its problems are not here" if data is None else f"there is no {data}",
            place=f"suite {suite}",
            remedy="--data FILE; docs/evaluation.md says which data set fits",
        )
    path = folder / f"{suite}.yaml"
    path.write_text((_SUITES / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    data = _unpacked(data, folder) if data.suffix == ".gz" else data.absolute()
    source = f"data.sources.suite-{suite}"
    # LiveCodeBench has a reader of its own, for JSON Lines.
    parquet = data.suffix == ".parquet" and suite != "livecodebench"
    return path, [f"{source}.uri={data}", *([f"{source}.kind=parquet"] if parquet else [])]


def _unpacked(data: Path, folder: Path) -> Path:
    """Write a gzip file's contents into a folder; return the path."""
    path, size = folder / data.stem, 0
    try:
        with gzip.open(data) as packed, path.open("wb") as plain:
            while chunk := packed.read(_CHUNK_BYTES):
                size += plain.write(chunk)
                if size > MAX_UNPACKED_BYTES:
                    raise UserError(f"more than {MAX_UNPACKED_BYTES} bytes", place=str(data))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"cannot be unpacked: {error}", place=str(data), remedy="fetch the file again"
        ) from error
    return path
