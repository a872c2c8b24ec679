"""A real pair calibrated on a CPU: `transformers` samples in bfloat16, JAX recomputes in float32.

    python -m benchmarks.calibration [--submissions N] [--model 64|128]

A Qwen2 is trained here on real text (`benchmarks.null.text_model`) and rounded to bfloat16. torch
samples N submissions of 32 rollouts by the leases' noise, which `verify.calibration` measures, and
as many again, of other prompts and leases, by which its limits are judged: what they reject of the
right weights are false rejections, of perturbed ones it is their power. Limits for rates that can
be counted are judged too, to see whether the formula keeps them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.null.text_model import PROMPT, Size, held_out, read_text, train
from benchmarks.perturbed import Change, Rejections, int8, noise, perturb
from learner_jax.leaves import save_weights
from runspec.core.models.family import hf_config
from runspec.core.process import setup_logging
from runspec.core.schema import RunSpec
from tests.verify.calibration.honest_run import WORKER, HonestRun
from verify.calibration import calibrate
from verify.calibration.measure import find_version, link_version, recomputed, submissions_of
from verify.formats.lease import Lease, lease_digest
from verify.formats.submission import Rollout
from verify.noise import gumbel, noise_key
from verify.thresholds import BFLOAT16, Limits
from verify.toploc import build_proofs

MODELS = {"64": Size(64, 2, 150, 8, 3e-3), "128": Size(128, 4, 120, 16, 2e-3)}
GROUPS, GROUP_SIZE, NEW_TOKENS, VOCAB = 4, 8, 128, 256
END = ord(":")
SPOILT: dict[str, Change] = {
    "off by 0.5 %": noise(0.005),
    "off by 1 %": noise(0.01),
    "off by 2 %": noise(0.02),
    "int8": int8,
}
COUNTABLE = (0.1, 0.01)
"""Rates that 2,048 rollouts can show: whether the formula keeps them."""


def spec_of(name: str, size: Size) -> RunSpec:
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": name,
            "seed": 1,
            "steps": 4,
            "model": {"hf": "text", "max_context": 256},
            "data": {"max_prompt_tokens": PROMPT, "sources": [{"name": "text", "kind": "text"}]},
            "algorithm": {"prompts_per_step": GROUPS, "group_size": GROUP_SIZE},
            "optimizer": {"lr": 1e-3},
            "reward": [{"name": "none", "kind": "none"}],
            "learner": {
                "hardware": {"kind": "cpu"},
                "packing": {"tokens": PROMPT + NEW_TOKENS, "rows": 16},
                "compute_dtype": "float32",
            },
            "samplers": [
                {
                    "name": "torch",
                    "hardware": {"kind": "cpu"},
                    "dtype": "bfloat16",
                    "max_model_len": 256,
                    "max_new_tokens": NEW_TOKENS,
                    "groups_per_submission": GROUPS,
                }
            ],
        }
    )


def sampled(model: Any, lease: Lease, digest: str, prompts: np.ndarray) -> list[Rollout]:
    """The rollouts of a lease; prompts are i32 [groups, 32]."""
    rows = [(group, sample) for group in range(GROUPS) for sample in range(GROUP_SIZE)]
    keys = np.array([noise_key(lease.seed, *row) for row in rows], np.int64).astype(np.int32)
    ids = torch.from_numpy(prompts[[group for group, _ in rows]].astype(np.int64))
    past, tokens, logprobs, states = None, [], [], []
    for position in range(NEW_TOKENS):
        found = model.model(input_ids=ids, past_key_values=past, use_cache=True)
        past, hidden = found.past_key_values, found.last_hidden_state[:, -1]
        scaled = model.lm_head(hidden).float()
        with np.errstate(over="ignore"):
            drawn = gumbel(
                np, keys[:, :1], keys[:, 1:], np.int32(position), np.arange(VOCAB, dtype=np.int32)
            )
        chosen = np.argmax(scaled.numpy() + drawn, axis=1)
        tokens.append(chosen)
        logprobs.append(torch.log_softmax(scaled, -1).numpy()[np.arange(len(rows)), chosen])
        states.append(hidden.view(torch.int16).numpy().view(np.uint16))
        ids = torch.from_numpy(chosen[:, None])
    made = []
    for number, (group, sample) in enumerate(rows):
        output = np.array([step[number] for step in tokens], np.int32)
        ends = np.flatnonzero(output == END)
        length = int(ends[0]) + 1 if len(ends) else NEW_TOKENS
        made.append(
            Rollout(
                run=lease.run,
                step=lease.step,
                worker=WORKER.public_hex,
                lease=digest,
                problem_id=f"text-{lease.index}-{group}",
                group=group,
                sample=sample,
                version=lease.version,
                prompt_tokens=prompts[group],
                output_tokens=output[:length],
                logprobs=np.array([step[number] for step in logprobs[:length]], np.float32),
                finish_reason="stop" if len(ends) else "length",
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                target=None,
                task_reward=0.0,
                length_penalty=0.0,
                proofs=build_proofs(np.stack([step[number] for step in states[:length]])),
            )
        )
    return made


def run_of(directory: Path, spec: RunSpec, params: Any, size: Size, prompts: np.ndarray) -> None:
    """A run directory with a submission for each of i32 [N, groups, 32]."""
    run = HonestRun(directory, spec)
    folder = run.weights(0)
    save_weights(params, size.config, folder)
    config = hf_config(size.config, dtype="float32", eos_token_id=END, pad_token_id=0)
    (folder / "config.json").write_text(json.dumps(config))
    run.publish(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad(), closing(run):
        for its in prompts:
            signed, lease = run.lease(0, GROUPS)
            run.take(signed, lease, sampled(model, lease, lease_digest(signed), its))


def judged(run_dir: Path, spec: RunSpec, limits: dict[str, Limits], most: int) -> dict[str, Any]:
    """What limits reject of a run's submissions, by the validator's weights: the right ones for
    all submissions, perturbed ones for `most`."""
    taken = submissions_of(run_dir, spec, "torch")
    lease = taken[0].lease
    version = find_version(run_dir, spec.name, 0, lease.manifest_digest, None)
    assert version is not None
    rows: dict[str, Any] = {}
    for name, change in [("right", None), *SPOILT.items()]:
        counts = {each: Rejections(limits[each]) for each in limits}
        distance: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            some, cache = taken if change is None else taken[:most], Path(folder)
            linked = link_version(version, cache)
            if change is not None:
                perturb(linked, change)
            for _, pairs in recomputed(some, spec, spec.samplers[0], cache, BFLOAT16.gap):
                apart = [np.abs(row.logprobs - found.logprobs) for row, found in pairs]
                distance.append(float(np.concatenate(apart).mean()))
                for each in counts.values():
                    each.take(pairs)
        rows[name] = {
            "mean_dlogp": [round(min(distance), 5), round(max(distance), 5)],
            **{
                each: {
                    "submissions": found.submissions,
                    "rejected_submissions": found.rejected_submissions,
                    "rollouts": found.rollouts,
                    "rejected_rollouts": found.rejected_rollouts,
                    "by": found.named(),
                }
                for each, found in counts.items()
            },
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submissions", type=int, default=64)
    parser.add_argument("--model", choices=MODELS, default="128")
    options = parser.parse_args()
    log, begun = setup_logging("calibration"), time.monotonic()
    size, text = MODELS[options.model], read_text()
    params, _, loss = train(size, text)
    log.info("trained to %.2f nats in %.0f s", loss, time.monotonic() - begun)
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    count = options.submissions
    prompts = held_out(text, 2 * count * GROUPS)[:, :PROMPT].reshape(2, count, GROUPS, PROMPT)
    with tempfile.TemporaryDirectory() as name:
        folders = {}
        for which, its in zip(("measured", "fresh"), prompts, strict=True):
            folders[which] = Path(name) / which
            run_of(folders[which], spec_of(f"text-{which}", size), params, size, its)
            log.info("%s: sampled after %.0f s", which, time.monotonic() - begun)
        profile = calibrate(folders["measured"], "torch", log=log)
        limits = {"published": BFLOAT16, "profile": profile.as_limits()}
        for rate in COUNTABLE:
            loose = calibrate(folders["measured"], "torch", rate=rate, log=log)
            limits[f"rate {rate:g}"] = loose.as_limits()
        power = judged(folders["fresh"], spec_of("text-fresh", size), limits, min(count, 32))
    found = {
        "hidden": size.hidden,
        "layers": size.layers,
        "loss": round(loss, 3),
        "profile": profile.model_dump(mode="json"),
        "fresh": power,
        "seconds": round(time.monotonic() - begun),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
