"""The run that is served: its spec, and the policy version that samples and judges."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.sampler_proofs import save_model
from runspec.core import schema
from runspec.core.schema.load import SpecFiles, dump_resolved
from runspec.lint.check import check_spec
from verify.plugins import load_warm_start_data

SPEC = Path(__file__).parent.parent.parent / "specs" / "target_short.yaml"


def spec_for(options: argparse.Namespace, group_size: int) -> schema.RunSpec:
    """The laptop profile, with the sizes asked for."""
    sets = ["name=validator-speed", f"algorithm.group_size={group_size}"]
    if options.layers:
        longest = 64 + options.new_tokens
        heads = max(1, options.hidden // 64)
        sets += [
            f"model.shape.num_hidden_layers={options.layers}",
            f"model.shape.hidden_size={options.hidden}",
            f"model.shape.intermediate_size={3 * options.hidden}",
            f"model.shape.vocab_size={options.vocabulary}",
            f"model.shape.num_attention_heads={heads}",
            f"model.shape.num_key_value_heads={max(1, heads // 4)}",
            f"model.max_context={longest}",
            f"samplers.volunteers.max_new_tokens={options.new_tokens}",
            f"samplers.volunteers.max_model_len={longest}",
            f"learner.packing.tokens={longest}",
        ]
    sets += [f"samplers.volunteers.dtype={options.dtype}", f"learner.compute_dtype={options.dtype}"]
    return check_spec(SpecFiles(SPEC, profile="laptop", overrides=sets)).require()


WARM_START = """
import logging, sys
from pathlib import Path
from learner_jax.warm_start import make_initial_model

logging.basicConfig(level=logging.INFO)
make_initial_model(*map(Path, sys.argv[1:]), logging.getLogger("warm-start"))
"""
"""Makes version 0: RUN_DIR CACHE."""


def make_version(spec: schema.RunSpec, options: argparse.Namespace, folder: Path) -> Path:
    """Version 0: after the profile's warm start, or random where a size was asked for."""
    if not options.layers:
        run = folder / "run"
        run.mkdir()
        (run / "spec.json").write_bytes(dump_resolved(spec))
        cache = options.cache or folder / "cache"
        mesh = "--xla_force_host_platform_device_count=2"  # the profile's
        subprocess.run(
            [sys.executable, "-c", WARM_START, str(run), str(cache)],
            check=True,
            stdout=sys.stderr,
            env={**os.environ, "XLA_FLAGS": mesh},
        )
        return run / "initial"
    shape = {"prompt_tokens": 64, **vars(options)}
    version = save_model(folder / "v0", argparse.Namespace(**shape), torch.float32)
    load_warm_start_data(spec).write_tokenizer(version)
    return version
