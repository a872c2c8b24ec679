"""Counts the functions of ours that four walks through the product enter.

    python -m benchmarks.walks [WALK ...]     prints a numbered list for each walk; JSON at the end

A walk runs in this process, as tests have it, without vLLM: the engine that loads a version is the
validator's JAX engine. Each function is listed once, where it is first entered. Tests are found by
their names, so the file runs in a checkout of an older commit too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("runspec", "learner_jax", "bridge", "broadcast", "sampler", "verify")
WALKS = {
    "spec": [],  # `spec_to_role`
    "version": ["test_versions_are_fetched_checked_and_kept_apart"],
    "rollout": [
        "test_honest_rollouts_reach_the_batches_and_no_others",
        "test_a_submission_that_is_refused_is_logged_and_work_goes_on",
        "test_every_step_makes_a_version_a_line_and_samples",
    ],
    "document": [
        "test_every_token_but_the_first_is_predicted_once_an_epoch",
        "test_a_step_makes_its_updates_one_after_the_other",
    ],
}
"""Walks, and the tests that take them: a policy version from learner to loaded engine, a rollout
from lease to gradient, a document's row to a trained batch."""
ONLY = {"version": "jax"}
"""What the name of a parametrised test must have in it."""
_FUNCTION = 0x1  # CO_OPTIMIZED, which bodies of classes and modules lack


class Entered:
    """Functions of ours in the order in which they are first entered, in any thread."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], None] = {}
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        try:
            file = Path(code.co_filename).resolve().relative_to(ROOT)
        except ValueError:
            return
        if file.parts[0] in PRODUCT and code.co_flags & _FUNCTION and "<" not in code.co_name:
            self.names[file.as_posix(), code.co_qualname] = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        with self.watching():
            return (yield)


def spec_to_role(folder: Path, entered: Entered) -> None:
    """Read a spec, prepare its run, and start the first role, which then ends."""
    from runspec.local.backend import LocalProcesses
    from runspec.local.processes import role_specs
    from tests.runspec.local.fake_run import prepared, small_spec

    with entered.watching(), prepared(small_spec(), folder) as run:
        logs = run.directory / "logs"
        logs.mkdir(exist_ok=True)
        processes = LocalProcesses(logs)
        processes.start(role_specs(run)[0])
        processes.close(10.0)


def run_tests(walk: str, entered: Entered) -> None:
    """Run the tests of a walk, whichever files have them."""
    for name in WALKS[walk]:
        command = ["git", "grep", "-l", f"def {name}(", "--", "tests"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        words = [found.stdout.split()[0], "-q", "-k", f"{name} and {ONLY.get(walk, 'test')}"]
        code = pytest.main([*words, "-p", "no:xdist", "--no-header"], plugins=[entered])
        if code != 0:
            raise SystemExit(f"{walk}: {name} ended with {code!r}")


def main(names: list[str]) -> None:
    counts = {}
    for walk in names or list(WALKS):
        entered = Entered()
        if walk == "spec":
            with tempfile.TemporaryDirectory() as folder:
                spec_to_role(Path(folder), entered)
        else:
            run_tests(walk, entered)
        print(f"\n{walk}: {len(entered.names)} functions in {len({f for f, _ in entered.names})}")
        for number, (file, function) in enumerate(entered.names, start=1):
            print(f"{number}. {file} {function}")
        counts[walk] = len(entered.names)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
