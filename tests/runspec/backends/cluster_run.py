"""Small runs on the test double of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.harness import SMALL, TARGET_SHORT
from tests.runspec.backends.fake_kubelet import FakeKubelet
from tests.runspec.cli.in_process import runspec


@contextmanager
def on_cluster(folder: Path, overrides: Mapping[str, Any]) -> Iterator[FakeKubelet]:
    """The laptop profile as `runspec render` writes it, before anything is started."""
    values = {**SMALL, **overrides, "placement.kubernetes.image": "runspec:test"}
    words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    where = ("-o", folder / "manifests", "--runs-dir", folder / "runs")
    done = runspec(
        *("render", TARGET_SHORT, "--profile", "laptop", *words),
        *("--backend", "kubernetes", *where),
    )
    assert done.returncode == 0, done.stderr
    [made] = (folder / "manifests").iterdir()
    with FakeKubelet(list(yaml.safe_load_all(made.read_text())), folder / "kubelet") as kubelet:
        yield kubelet
