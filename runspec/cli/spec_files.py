"""A spec from its files, as the commands that act on runs want it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from runspec.core.errors import BadUsage, UserError, bad_usage
from runspec.core.files import expand_user
from runspec.core.schema import RunSpec
from runspec.core.schema.findings import format_finding
from runspec.core.schema.load import SpecFiles, with_profiles
from runspec.core.schema.source_files import whole_uri
from runspec.lint import TokenizerFiles
from runspec.lint.check import check_spec
from runspec.lint.rules.data import thinking_of
from runspec.local.machine import find_tokenizer
from runspec.lock import is_repository, require_lock
from runspec.plan import read_plan


def located(spec: RunSpec, folder: Path) -> RunSpec:
    """The spec with local models and data by their whole paths, and its profiles' contents in it:
    the run's roles may run elsewhere.

    Args:
        spec: its `model.hf`, `model.tokenizer.hf`, sources' `uri` and profiles may lie beside it.
        folder: of the spec's file, where relative paths start from.

    Raises:
        UserError: a profile cannot be read.
    """
    model = spec.model
    if model.hf is not None:
        model = model.model_copy(update={"hf": _whole(model.hf, folder)})
    if model.tokenizer is not None:
        tokenizer = {"hf": _whole(model.tokenizer.hf, folder)}
        model = model.model_copy(update={"tokenizer": model.tokenizer.model_copy(update=tokenizer)})
    whole = spec.model_copy(update={"model": model})
    sources = [
        source
        if source.uri is None
        else source.model_copy(update={"uri": whole_uri(source.uri, folder)})
        for source in spec.data.sources
    ]
    data = spec.data.model_copy(update={"sources": sources, "thinking": _thinking(whole)})
    return with_profiles(spec.model_copy(update={"model": model, "data": data}), folder)


def _thinking(spec: RunSpec) -> Literal["required", "optional", "none"] | None:
    """What `data.thinking` says or, where it is not set, the model's chat template."""
    if spec.data.thinking is not None or spec.supervised is not None:
        return spec.data.thinking
    if spec.model.shape is not None:
        return "required"
    folder = find_tokenizer(spec.model, os.environ)
    files = None if folder is None else TokenizerFiles.read(folder)
    return None if files is None else thinking_of(files, spec.data)


def _whole(name: str, folder: Path) -> str:
    path = folder / expand_user(Path(name))
    try:
        return str(path.resolve()) if path.is_dir() or not is_repository(name) else name
    except OSError:  # a name that can be no path
        return name


def sound_spec(files: SpecFiles, *, pins_root: bool = False) -> RunSpec:
    """The spec, if it has no errors and is what its lock says, `located`; prints its warnings.

    Args:
        files: what to load.
        pins_root: whether the caller makes and pins a root where the spec names none.

    Raises:
        BadUsage: a file cannot be read, or bad usage.
        UserError: listing every error with its place, or what the lock pins otherwise.
    """
    _refuse_plan(files.path)
    with bad_usage():
        checked = check_spec(files)
    if pins_root:
        rest = [finding for finding in checked.findings if finding.code != "unsigned-weights"]
        checked = replace(checked, findings=rest)
    spec = checked.require()
    require_lock(spec, files.path, files.profile)
    for warning in checked.findings:
        print(format_finding(warning), file=sys.stderr)
    return located(spec, files.path.parent)


def _refuse_plan(path: Path) -> None:
    """A saved plan is YAML too, and would be a spec with much that is wrong."""
    try:
        plan = read_plan(path)
    except (OSError, UserError):
        return  # whatever it is, the loader says what is wrong with it
    if plan is not None:
        raise BadUsage(
            "a saved plan, not a spec", place=str(path), remedy=f"`runspec apply {path}`"
        )
