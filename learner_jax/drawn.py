"""Version 0 of a run that begins with random weights: drawn from the run's seed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp

from learner_jax.execution import full_float32
from learner_jax.leaves import save_weights
from learner_jax.model import init_params
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.models.config import CONFIG_NAME
from runspec.core.models.decoder import hf_config
from runspec.core.models.parameters import parameter_count
from runspec.core.process import not_retried
from runspec.core.run_files import initial_model
from runspec.core.spec.resolved import load_resolved
from runspec.core.tokenizer_files import TokenizerFiles


def draw_initial_model(run_dir: Path, log: logging.Logger) -> None:
    """Write weights and config.json of `model.shape` beside the tokenizer in `initial/`.

    config.json comes last: where it is, version 0 is whole.

    Raises:
        UserError: the tokenizer cannot be read, or has no end token.
    """
    spec, folder = load_resolved(run_dir), initial_model(run_dir)
    with not_retried():
        config = model_config(spec)
        files = TokenizerFiles.read(folder)
        end = files.special_id("eos_token")
        if end is None:
            raise UserError(
                "the tokenizer has no end token",
                place=files.place,
                remedy="name eos_token in tokenizer_config.json",
            )
        padding = files.special_id("pad_token")
        padding = end if padding is None else padding
    full_float32(jnp.float32)
    params = init_params(config, jax.random.key(spec.seed))
    save_weights(params, config, folder)
    fields = hf_config(config, dtype="float32", eos_token_id=end, pad_token_id=padding)
    write_atomic(folder / CONFIG_NAME, json.dumps(fields, indent=2).encode())
    log.info("drawn from seed %d: %.3g parameters", spec.seed, parameter_count(config))
