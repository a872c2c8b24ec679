"""Supervised training comes near a known entropy, and beats a 5-gram on held-out solutions.

`known source`: a model of 0.1M parameters trains on reads of one random organism, a base a token.
Its bits on held-out bases are compared with those of the organism's own table; 2 % more are a
failure. `gsm8k`: `sft` on GSM8K's training set, from nothing; its bits a byte on the answers of the
test set, ends included, are compared with those of a 5-gram that is fitted to the same answers.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.references import markov
from benchmarks.references.ngram import NGram
from learner_jax.corpus.packed import CorpusRows
from learner_jax.corpus.sources import GeneratedReads
from learner_jax.corpus.tokenizer import Scheme, train_tokenizer
from runspec.core.schema import RunSpec
from tests.campaigns.sampler import GSM8K

LOG = logging.getLogger(__name__)
READS = {"organisms": 1, "reads": 40_000, "length": 126, "seed": 0}
"""A read and two special tokens fill a row."""
BASE_TOKENS = 12
"""METAGENE's special tokens and `_ A C G T N`."""
MARGIN = 0.02
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|eos|>{% endgeneration %}"
    "{% else %}<|bos|>{{ message.content }}\n{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Size:
    """A model and how long it trains."""

    vocabulary: int
    hidden: int
    layers: int
    row: int
    rows: int
    """Rows of an update."""
    updates: int
    lr: float = 3e-3

    def spec(self, source: dict[str, Any], kind: str, held_out: int) -> RunSpec:
        """A run of one device on one source."""
        shape = {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 32,
        }
        return RunSpec.model_validate(
            {
                "version": "runspec/v1",
                "name": "bits",
                "seed": 0,
                "steps": self.updates,
                "model": {"max_context": self.row, "shape": shape},
                "data": {"sources": [{"name": "documents", **source}]},
                "algorithm": {
                    "kind": kind,
                    "tokens_per_update": self.row * self.rows,
                    "held_out": {"tokens": held_out},
                },
                "optimizer": {
                    "lr": self.lr,
                    "betas": [0.9, 0.98],
                    "warmup_updates": 20,
                    "schedule": "cosine",
                    "decay_updates": self.updates - 20,
                    "final_lr": self.lr / 20,
                },
                "learner": {
                    "hardware": {"kind": "cpu"},
                    "packing": {"tokens": self.row, "rows": self.rows},
                    "remat": "none",
                    "compute_dtype": "float32",
                },
                "broadcast": {"dtype": "float32"},
            }
        )


READS_SIZE = Size(BASE_TOKENS, 64, 2, row=128, rows=16, updates=600, lr=5e-3)
GSM8K_SIZE = Size(1024, 128, 4, row=768, rows=5, updates=500)
"""The longest conversation has 697 tokens."""


def write_model(folder: Path, spec: RunSpec, texts: Iterable[str], scheme: Scheme) -> Tokenizer:
    """Write config.json and a tokenizer that is trained on the texts."""
    from runspec.core.models.family import hf_config, model_config

    config = model_config(spec)
    assert config is not None
    tokenizer = train_tokenizer(texts, config.vocab_size, scheme)
    names = {"nucleotides": ("[PAD]", "[EOS]"), "text": ("<|pad|>", "<|eos|>")}[scheme]
    pad, end = map(tokenizer.token_to_id, names)
    fields = hf_config(config, dtype="float32", eos_token_id=end, pad_token_id=pad)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(zip(("pad_token", "eos_token"), names, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def trained_bits(spec: RunSpec, rows: Any, held_out: CorpusRows) -> tuple[float, float, int]:
    """Train a model from nothing.

    Args:
        spec: of the run, one update a step.
        rows: the corpus.
        held_out: what is scored at the end.

    Returns:
        -log2 p of the held-out targets, seconds of training, parameters.
    """
    import jax

    from learner_jax.model import abstract_params, init_params
    from learner_jax.sharding import make_mesh, shard_params
    from learner_jax.step import build_programs
    from learner_jax.training import held_out_loss, supervised_step
    from runspec.core.models.family import model_config

    config = model_config(spec)
    assert config is not None
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    params = init_params(config, jax.random.key(spec.seed))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = programs.init_state(shard_params(params, abstract_params(config), mesh))
    begun, count = time.monotonic(), spec.learner.packing.rows
    for step in range(spec.steps):
        part = rows.read(step * count, (step + 1) * count)
        result = supervised_step(spec, mesh, programs, state, part)
        state = result.state
        if step % 50 == 49:
            LOG.info("update %d: loss %.3f", step + 1, result.numbers["loss"])
    seconds = time.monotonic() - begun
    nats = held_out_loss(spec, mesh, programs, programs.publish(state.params), held_out)
    return nats / math.log(2), seconds, size


def known_source(
    folder: Path, size: Size = READS_SIZE, reads: dict[str, int] = READS, held_out: int = 65536
) -> dict[str, object]:
    """Compare a model with the source of its reads, in bits on the same held-out bases.

    Raises:
        RuntimeError: the model needs 2 % more.
    """
    from learner_jax.corpus.packed import open_corpus

    generated = GeneratedReads(**reads)
    table = generated.tables()[0]
    gap = markov.entropy(table, 2) - markov.entropy(table, 3)
    if gap < 0.2:
        raise RuntimeError(f"H(2) - H(3) is {gap:.3f} bits a base")
    spec = size.spec({"kind": "generated_reads", "params": reads}, "pretrain", held_out)
    tokenizer = write_model(folder / "reads", spec, ["ACGTN"], "nucleotides")
    corpus = open_corpus(spec, folder / "reads", folder / "cache", LOG)
    rows = corpus.held_out()
    assert rows is not None
    # Of the bases alone: the source does not say where a read ends.
    letters = {tokenizer.token_to_id(base): base for base in markov.BASES}
    targets, segments = rows.batch.targets, rows.batch.segment_ids
    rows = replace(rows, weights=rows.weights * np.isin(targets, list(letters)))
    texts = [
        "".join(letters.get(token, "") for token in row[of_row == number].tolist())
        for row, of_row in zip(targets, segments, strict=True)
        for number in range(1, of_row.max() + 1)
    ]
    count = sum(map(len, texts))
    own = markov.bits(table, texts) / count
    bits, seconds, parameters = trained_bits(spec, corpus, rows)
    figures = {
        "parameters": parameters,
        "H(2)": round(markov.entropy(table, 2), 4),
        "H(3)": round(markov.entropy(table, 3), 4),
        "held-out bases": count,
        "source's bits a base": round(own, 4),
        "model's": round(bits / count, 4),
        "over": f"{bits / count / own - 1:.2%}",
        "seconds": round(seconds),
    }
    if bits / count > (1 + MARGIN) * own:
        raise RuntimeError(f"more than {MARGIN:.0%} over the source: {figures}")
    return figures


def conversations(file: Path, out: Path) -> list[bytes]:
    """Write questions and answers as conversations; return the answers."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    with out.open("w", encoding="utf-8") as stream:
        for row in rows:
            said = zip(("user", "assistant"), (row["question"], row["answer"]), strict=True)
            messages = [{"role": role, "content": content} for role, content in said]
            print(json.dumps({"messages": messages}), file=stream)
    return [row["answer"].encode() for row in rows]


def gsm8k(folder: Path, size: Size = GSM8K_SIZE) -> dict[str, object]:
    """Compare `sft` with a 5-gram, in bits a byte of the test set's answers.

    Raises:
        RuntimeError: a conversation is left out, or the 5-gram is as good.
    """
    from learner_jax.corpus.packed import open_corpus

    answers = {}
    for name, file in zip(("train", "test"), GSM8K, strict=True):
        answers[name] = conversations(file, folder / f"{name}.jsonl")
    sources = {
        name: {
            "kind": "jsonl",
            "uri": str(folder / f"{name}.jsonl"),
            "params": {"messages": "messages"},
        }
        for name in answers
    }
    spec, test = (size.spec(sources[name], "sft", 0) for name in ("train", "test"))
    texts = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    said = (m["content"] for line in texts for m in json.loads(line)["messages"])
    write_model(folder / "gsm8k", spec, said, "text")
    corpus, held_out = (
        open_corpus(each, folder / "gsm8k", folder / "cache", LOG) for each in (spec, test)
    )
    count = sum(map(len, answers["test"]))
    scored = held_out.totals.documents
    if scored != len(answers["test"]):
        raise RuntimeError(f"{scored} of {len(answers['test'])} answers are scored")
    bits, seconds, parameters = trained_bits(spec, corpus, held_out.read(0, held_out.rows))
    fivegram = NGram.fitted(answers["train"]).bits_per_byte(answers["test"])
    figures = {
        "parameters": parameters,
        "held-out bytes": count,
        "5-gram's bits a byte": round(fivegram, 3),
        "model's": round(bits / count, 3),
        "epochs": round(spec.steps * size.rows / corpus.rows, 2),
        "seconds": round(seconds),
    }
    if bits / count >= fivegram:
        raise RuntimeError(f"the 5-gram is as good: {figures}")
    return figures


def run() -> dict[str, dict[str, object]]:
    """Train both models.

    Returns:
        The figures of each.
    """
    logging.basicConfig(level=logging.INFO)
    with tempfile.TemporaryDirectory(prefix="runspec-bits-") as temporary:
        folder = Path(temporary)
        return {"known source": known_source(folder), "gsm8k": gsm8k(folder)}
