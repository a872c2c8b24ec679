"""A real worker that cheats: `python -m tests.attacks.dishonest_worker MODE POOL FOLDER KEY`.

MODE is `perturbed` (serves other weights than the leased version's) or `edited` (changes a token
after generating it). All else is the honest worker's own code.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from runspec.core.process import Role, run_role, stop_event
from sampler.engine.engine import Engine
from sampler.engine.requests import LoadReport
from sampler.worker import work
from sampler.worker.worker import Worker
from verify.formats.submission import Rollout

RELATIVE_NOISE = 0.1


class PerturbedEngine(Engine):
    """Adds noise to every matrix before it loads a version, and asks no questions after."""

    def load(self, weights_dir: Path, version: int) -> LoadReport:
        copy = weights_dir.parent / f"perturbed-v{version}"
        shutil.copytree(weights_dir, copy, dirs_exist_ok=True)
        noise = np.random.default_rng(version)
        for path in copy.glob("*.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                scale = RELATIVE_NOISE * tensor.std()
                tensors[name] = tensor + scale * noise.standard_normal(tensor.shape, np.float32)
            save_file(tensors, path)
        return super().load(copy, version)

    def check(
        self, weights_dir: Path, version: int, report: LoadReport | None = None
    ) -> LoadReport:
        return LoadReport([], [], [])


class TokenEditor(Worker):
    """Replaces the first token of each output, and claims everything else as it was."""

    def finish(self, rollouts: list[Rollout]) -> list[Rollout]:
        return [self._edit(rollout) for rollout in rollouts]

    def _edit(self, rollout: Rollout) -> Rollout:
        tokens = rollout.output_tokens.copy()
        if len(tokens) <= 2:
            return rollout
        tokens[0] = tokens[1] if tokens[1] != tokens[0] else rollout.prompt_tokens[0]
        return replace(rollout, output_tokens=tokens)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["perturbed", "edited"])
    parser.add_argument("pool")
    parser.add_argument("folder", type=Path)
    parser.add_argument("key", type=Path)
    options = parser.parse_args()
    role, stop = Role.load(options.pool, options.folder, key_file=options.key), stop_event()
    kinds = {"engine": PerturbedEngine} if options.mode == "perturbed" else {"worker": TokenEditor}
    return run_role(options.mode, lambda log: work(role, log, stop, **kinds))


if __name__ == "__main__":
    sys.exit(main())
