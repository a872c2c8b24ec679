"""inspect-ai, lm-eval and verifiers, each whole, ask a tiny model that `runspec evaluate` serves.

It needs `make eval-inspect eval-lm-eval eval-verifiers`. The newest transformers of the registry,
in a folder of its own, loads an export by the lines of its model card. The files that the tools
write go to `.cache/evaluation_tools`; `tests/sampler/evaluation/tools` has copies of some.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from runspec.core.schema.load import load_resolved
from runspec.local.model_folders import export_version
from tests.harness import ROOT
from tests.runspec.cli.published import code_of_card, publish_run

TASKS = Path(__file__).parent / "tool_tasks"
ENVIRONMENTS = ROOT / ".venv"
KEPT = ROOT / ".cache" / "evaluation_tools"
DEADLINE_S = 600.0
CONTEXT = 4096
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Name: adapter, environment, task, further options, and the figures that it must give.
RUNS: dict[str, tuple[str, str, str, list[str], set[str]]] = {
    "inspect-ai": (
        "inspect-ai",
        "eval-inspect",
        "inspect_letters.py@letters",
        ["--max-tokens", "64", "--epochs", "2", "--no-log-samples"],
        {"includes.accuracy"},
    ),
    "lm-eval": (
        "lm-eval",
        "eval-lm-eval",
        "letters",
        ["--include_path", "."],
        {"exact_match.letter"},
    ),
    "lm-eval by likelihood": (
        "lm-eval",
        "eval-lm-eval",
        "choices",
        ["--include_path", ".", "--model", "local-completions"],
        {"acc", "acc_norm"},
    ),
    "verifiers": (
        "verifiers",
        "eval-verifiers",
        "letters",
        ["--sampling.max-tokens", "64", "--num-rollouts", "2"],
        {"mean", "characters"},
    ),
}


def run() -> dict[str, object]:
    """Runs each tool; returns problems, faults and figures of each."""
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        model = byte_model(Path(folder) / "tiny")
        found = {name: _ran(name, model) for name in RUNS}
        return {**found, "newest transformers": newest_transformers(Path(folder))}


_SHOWN = "import json, transformers as t; logits = model(ids).logits.tolist()\n"
_SHOWN += "print(json.dumps([t.__version__, ids.tolist(), logits]))"


def newest_transformers(folder: Path) -> dict[str, object]:
    """Export a run, and compare what the newest transformers and the pinned one make of it.

    The export is of a Qwen 2 with a tokenizer that no Qwen 2 has. Torch is ours for both.
    """
    packages, export, run_dir = folder / "packages", folder / "export", publish_run(folder, 1)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "transformers"]
    subprocess.run([*install, "--target", str(packages)], timeout=DEADLINE_S, check=True)
    export_version(run_dir, load_resolved(run_dir), None, export)
    found, words = [], [sys.executable, "-c", f"{code_of_card(export)}\n{_SHOWN}"]
    for path in ("", str(packages)):
        env = {**os.environ, "PYTHONPATH": path}
        out = subprocess.check_output(words, cwd=export, env=env, timeout=DEADLINE_S)
        found.append(json.loads(out.splitlines()[-1]))
    (pinned, ids, ours), (newest, others_ids, theirs) = found
    apart = float((torch.tensor(ours) - torch.tensor(theirs)).abs().max())
    assert ids == others_ids and apart < 1e-4, found
    return {"newest": newest, "pinned": pinned, "tokens": len(ids[0]), "logits_apart": apart}


def byte_model(folder: Path) -> Path:
    """Write a Hugging Face directory of random weights and a tokenizer of 256 bytes and an end."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    end = tokenizer.token_to_id(_END)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    values |= {"chat_template": _TEMPLATE, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def _ran(name: str, model: Path) -> dict[str, object]:
    tool, environment, task, more, wanted = RUNS[name]
    command = [sys.executable, "-m", "runspec", "evaluate", str(model), "--with", tool]
    command += ["--python", str(ENVIRONMENTS / environment / "bin" / "python"), "--task", task]
    command += ["--out", str(KEPT / name.replace(" ", "-")), "--json", "--", *more]
    done = subprocess.run(
        command,
        cwd=TASKS,  # where the tasks' files and the taskset's package lie
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{TASKS}"},
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    [found] = json.loads(done.stdout).values()
    figures = {figure: round(value, 3) for figure, (value, _, _) in found["figures"].items()}
    assert wanted <= figures.keys() and found["count"] >= 3 and not found["faults"], found
    return {"problems": found["count"], **figures, "seconds": found["wall_s"]}
