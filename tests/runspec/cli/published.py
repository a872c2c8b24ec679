"""A run `small` with published versions of tiny random models, and versions that appear later."""

from __future__ import annotations

import logging
import shutil
import textwrap
from pathlib import Path

from bridge.conversion import import_model
from bridge.publisher import Publisher
from broadcast.layout import manifest_name
from runspec.core.files import write_atomic
from runspec.core.run_files import params_folder, weights_folder
from runspec.core.schema.load import dump_resolved
from runspec.local.identity import make_identity
from sampler.tasks.traces import build_warm_start_data
from tests.runspec.local.fake_run import small_spec
from tests.sampler.engine.models import save_version

RUN = "small"


def publish_run(folder: Path, versions: int, **model: bool) -> Path:
    """The directory of a run whose versions 0 to `versions` - 1 are published, and all are kept.

    Args:
        folder: the run's is made in `runs/` of it.
        versions: how many; their seeds are their numbers.
        model: as for `save_version`.
    """
    spec = small_spec(RUN, 5, f"broadcast.keep_versions={max(versions, 4)}")
    run_dir = folder / "runs" / RUN
    run_dir.mkdir(parents=True)
    write_atomic(run_dir / "spec.json", dump_resolved(spec))
    make_identity(run_dir, spec)
    for version in range(versions):
        source = save_version(folder / f"m{version}", seed=version, **model)
        build_warm_start_data(spec).write_tokenizer(source)
        if version == 0:
            (run_dir / "initial").symlink_to(source)
        checkpoint = params_folder(run_dir, spec) / f"v{version}"
        import_model(source, checkpoint / "params")
        (checkpoint / "probe.json").write_bytes((source / "probe.json").read_bytes())
    Publisher(run_dir, spec, logging.getLogger("test")).publish_new()
    return run_dir


def code_of_card(export: Path) -> str:
    """The lines of an export's model card that load the model and ask it."""
    usage, _, _ = (export / "README.md").read_text().partition("## Recipe")
    lines = [line for line in usage.splitlines() if line.startswith("    ")]
    return textwrap.dedent("\n".join(lines))


def first_versions(run_dir: Path, runs_dir: Path, versions: int) -> Path:
    """A copy of a run in which only its first versions are published yet."""
    copy = runs_dir / RUN
    shutil.copytree(run_dir, copy, ignore=lambda folder, names: {"weights", "versions"} & {*names})
    for version in range(versions):
        publish_again(run_dir, copy, version)
    return copy


def publish_again(run_dir: Path, copy: Path, version: int, *, tampered: bool = False) -> None:
    """A version appears in the copy as a publisher's does: weights by a rename, then the manifest.

    Args:
        run_dir: of the run that has it.
        copy: see `first_versions`.
        version: its number.
        tampered: whether one bit of the weights is another one.
    """
    new = copy / f"new{version}"
    shutil.copytree(weights_folder(run_dir) / f"v{version}", new)
    if tampered:
        flip_bit(new)
    weights_folder(copy).mkdir(exist_ok=True)
    new.rename(weights_folder(copy) / f"v{version}")
    name = manifest_name(RUN, version)
    data = (run_dir / "store" / "origin" / name).read_bytes()
    (copy / "store" / "origin" / name).parent.mkdir(parents=True)
    write_atomic(copy / "store" / "origin" / name, data)


def flip_bit(folder: Path) -> None:
    """Changes the last weight of a Hugging Face directory."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
