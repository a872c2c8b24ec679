"""Bits a base tell unseen organisms, and a linear probe tells organisms apart.

The model is METAGENE-1's laptop profile, trained on reads of eight random organisms; `PROBE_MODEL`
names one that is there. New reads of these, the known panel, and of eight organisms that it never
saw are scored (`score`) and embedded (`embed`) by the commands of `learner_jax`. A read is detected
as unseen by its bits a base. A ridge regression from embeddings to organisms is fitted to half of
the reads and tested on the other half; counts of 4-mers and the organisms' own tables compare. All
is done with whole reads and with their first 20 bases.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.references import markov
from learner_jax.corpus.sources import GeneratedReads
from runspec.core.schema.load import SpecFiles, load_layers

SPEC = Path(__file__).parents[2] / "specs" / "metagene.yaml"
READS = 4000
"""New reads of the known organisms, and as many of unseen ones."""
LENGTHS = (100, 20)
"""Bases of a read that are looked at."""
UNSEEN_SEED = 1
RIDGE = 1e-2
"""Penalty on the squared weights, of standardized features, a read."""


def command(*words: str) -> None:
    """Run `python -m WORDS`; its output goes to standard error."""
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr)


def panels(reads: int = READS) -> dict[str, tuple[np.ndarray, list[str], np.ndarray]]:
    """Return the tables, new reads and organism of each read, of known and of unseen organisms.

    Args:
        reads: of each panel.
    """
    spec = load_layers(SpecFiles(SPEC, profile="laptop")).require()
    trained = GeneratedReads.of(spec.data.sources[0].params)
    found = {}
    for name, seed, skipped in (("known", trained.seed, trained.reads), ("unseen", UNSEEN_SEED, 0)):
        source = GeneratedReads(trained.organisms, skipped + reads, trained.length, seed)
        documents = [each for n, each in enumerate(source.documents()) if n >= skipped]
        organisms = np.array([int(each.name.partition("-")[0]) for each in documents])
        found[name] = source.tables(), [each.text for each in documents], organisms
    return found


def measured(folder: Path, model: Path, reads: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return bits a base, [reads], and embeddings, [reads, D], by the commands."""
    fasta, out, means = folder / "reads.fa", folder / "bits.tsv", folder / "means.npy"
    fasta.write_text("".join(f">{number}\n{read}\n" for number, read in enumerate(reads)))
    command("learner_jax", "score", str(model), "--sequences", str(fasta), "--out", str(out))
    command("learner_jax", "embed", str(model), "--sequences", str(fasta), "--out", str(means))
    lines = out.read_text().splitlines()[1:]
    return np.array([float(line.split("\t")[3]) for line in lines]), np.load(means)


def area(lower: np.ndarray, higher: np.ndarray) -> float:
    """Return the area under the ROC curve: how often a value of `higher` is the larger one."""
    order = np.sort(lower)
    left, right = (np.searchsorted(order, higher, side) for side in ("left", "right"))
    return float((left + right).mean() / 2 / len(lower))


def probe(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Fit a ridge regression to even reads; return the label that it gives each odd one.

    Args:
        features: [reads, D].
        labels: whole numbers from 0, [reads].
    """
    train = features[::2]
    mean, deviation = train.mean(axis=0), train.std(axis=0) + 1e-6
    x, tested = ((part - mean) / deviation for part in (train, features[1::2]))
    targets = np.eye(labels.max() + 1)[labels[::2]]
    bias = targets.mean(axis=0)
    gram = x.T @ x + RIDGE * len(x) * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, x.T @ (targets - bias))
    return (tested @ weights + bias).argmax(axis=1)


def counts(reads: Sequence[str], size: int = 4) -> np.ndarray:
    """Return how often each k-mer is in each read, [reads, 4^k]."""
    number = {"".join(bases): n for n, bases in enumerate(product(markov.BASES, repeat=size))}
    found = np.zeros((len(reads), len(number)))
    for row, read in zip(found, reads, strict=True):
        kmers = [number[read[at : at + size]] for at in range(len(read) - size + 1)]
        np.add.at(row, kmers, 1)
    return found


def likeliest(tables: np.ndarray, reads: Sequence[str]) -> np.ndarray:
    """Return the organism whose table gives each read the fewest bits: nothing does better."""
    return np.array([np.argmin([markov.bits(t, [read]) for t in tables]) for read in reads])


def trained_model(folder: Path) -> Path:
    """Train the laptop profile; return its last version."""
    command("runspec", "apply", str(SPEC), "--profile", "laptop", "--runs-dir", str(folder))
    steps = load_layers(SpecFiles(SPEC, profile="laptop")).require().steps
    return folder / "metagene" / "weights" / f"v{steps}"


def measure(folder: Path, model: Path, length: int) -> dict[str, object]:
    """Return the figures of reads that are cut to `length` bases.

    Returns:
        Mean bits a base of both panels, the area under the ROC curve of unseen against known
        reads, and for each panel the share of the tested reads whose organism is right.
    """
    figures: dict[str, object] = {}
    bits = {}
    for panel, (tables, reads, organisms) in panels().items():
        cut = [read[:length] for read in reads]
        bits[panel], embeddings = measured(folder, model, cut)
        figures[f"{panel}: bits a base"] = round(float(bits[panel].mean()), 3)
        for name, given in (
            ("embeddings", probe(embeddings, organisms)),
            ("4-mers", probe(counts(cut), organisms)),
            ("their tables", likeliest(tables, cut[1::2])),
        ):
            right = float((given == organisms[1::2]).mean())
            figures[f"{panel}: organism by {name}"] = f"{right:.1%}"
    figures["AUC of unseen against known"] = round(area(bits["known"], bits["unseen"]), 4)
    return figures


def run() -> dict[str, dict[str, object]]:
    """Train or find the model, and measure reads.

    Returns:
        The figures of each length.
    """
    with tempfile.TemporaryDirectory(prefix="runspec-probe-") as temporary:
        folder = Path(temporary)
        named = os.environ.get("PROBE_MODEL")
        model = Path(named) if named else trained_model(folder / "runs")
        return {f"{length} bases": measure(folder, model, length) for length in LENGTHS}
