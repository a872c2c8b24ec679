"""Forged TOPLOC proofs against real hidden states, and honest ones; prints JSON, a line a model.

    python -m benchmarks.toploc_null [MODEL ...] [--sampled] [--pretrained DIR] [--keep DIR]

Each model is trained here on real text, in minutes (`benchmarks.null.text_model`); `crafted` is
the model of hidden size 128 with six channels of its final norm scaled by 8. Windows of text are
drawn at random: the first are the forger's library, as many are somebody else's, the rest are
judged. A forgery is judged on every chunk: under the published limits, under those with signs and
the ratio to the best constant (`ratio`: the rules before the null test), and by all rules.
`decided` are the chunks where passing is worth 40 bits; the tail is of the positions hit there.
Limits are those of bfloat16, the looser. The windows hold text, which repeats itself word by word,
or with --sampled what the model samples itself at temperature 1 from their first 32 tokens.

With --keep the weights and the judgements are kept in DIR, after every 256 windows: a run that was
ended goes on where it was, and one of a larger scale adds what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.null import collisions
from benchmarks.null.honest import agreement, decided_by_rows
from benchmarks.null.judging import ANOTHERS_TABLE, FEW, GRANTED, Forgers, chunks_of
from benchmarks.null.models import Model, pretrained, text_model
from benchmarks.null.summary import explained, summary
from benchmarks.null.text_model import Size, read_text
from runspec.core.canonical import hash_parts
from verify.thresholds import BFLOAT16, NULL_BITS, RICH_BITS
from verify.toploc.statistics import GRANTED_CELLS, RADII

_PORTION = 256
_PRETRAINED = (60, 400)
_COLLIDING = (200, 1000)
"""Windows of each side of `collisions.bound`, at least and at most: else as many as a library's."""
MODELS: dict[str, tuple[Size, int, int, int]] = {
    "64": (Size(64, 2, 150, 8, 3e-3), 0, 2000, 9500),
    "128": (Size(128, 4, 120, 16, 2e-3), 0, 600, 3000),
    "crafted": (Size(128, 4, 120, 16, 2e-3), 6, 500, 2200),
    "256": (Size(256, 2, 40, 4, 1.5e-3), 0, 200, 800),
    "512": (Size(512, 2, 120, 2, 1.5e-3), 0, 80, 400),
}
"""Name: the model, its outlier channels, and how many windows of 7 chunks are a library's and are
judged."""


def judgements(model: Model, library: int, count: int, keep: Path | None) -> dict[str, np.ndarray]:
    """Of all forgeries: i16 [windows, 7, 3] each, `count` windows or a tenth of them.

    They are kept under a name that changes with the model, its text, the limits and the library.
    """
    limits = repr((BFLOAT16, NULL_BITS, RICH_BITS, RADII, GRANTED_CELLS))
    digest = hash_parts(model.source, limits).hex()[:16]
    path = keep and keep / f"judged-{model.name}-{library}-{digest}.npz"
    rows: dict[str, np.ndarray] = {}
    if path and path.exists():
        with np.load(path, allow_pickle=False) as kept:
            rows = {name: kept[name] for name in kept.files}
    done = len(rows[GRANTED]) if rows else 0
    if done >= count:
        tenth = -(-count // FEW)
        return {name: each[: count if len(each) == done else tenth] for name, each in rows.items()}
    known, others = (
        chunks_of(model.states(tokens), tokens)
        for tokens in (model.windows(0, library), model.windows(library, library))
    )
    forgers = Forgers(known, others)
    for first in range(done, count, _PORTION):
        tokens = model.windows(2 * library + first, min(_PORTION, count - first))
        real = chunks_of(model.states(tokens), tokens)
        for name, found in forgers.against(real, first):
            rows[name] = np.concatenate([rows[name], found]) if name in rows else found
        if path:
            unfinished = path.with_suffix(".part.npz")
            np.savez(unfinished, **rows)  # type: ignore[arg-type]
            unfinished.rename(path)
        print(f"{model.name}: {first + len(tokens)} of {count} windows", file=sys.stderr)
    return rows


def measure(
    model: Model, library: int, count: int, honest: int, keep: Path | None
) -> dict[str, Any]:
    rows = judgements(model, library, count, keep)
    each = max(_COLLIDING[0], min(library, _COLLIDING[1]))
    sample = model.windows(0, each)
    sides = [chunks_of(model.states(t), t).hidden for t in (sample, model.windows(each, each))]
    table = rows[ANOTHERS_TABLE]
    return {
        "model": model.name,
        "hidden": model.hidden,
        "layers": model.layers,
        "loss": model.loss,
        "library": library,
        "decided_by_rows": decided_by_rows(sides[0]),
        "forgeries": {name: summary(found) for name, found in rows.items()},
        "any_fixed_proof": collisions.bound(
            *(side.reshape(each, -1, *side.shape[1:]) for side in sides)
        ),
        "if_a_table_were_guessable": {
            name: explained(found, table)
            for name, found in rows.items()
            if len(found) == len(table) and found is not table
        },
        "honest": {
            pair: agreement(true, claimed, limits)
            for pair, true, claimed, limits in (model.pairs(sample[:honest]) if honest else ())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the windows judged")
    parser.add_argument("--honest", type=int, default=60, help="windows of each honest pair")
    parser.add_argument("--keep", type=Path, help="directory for weights and judgements")
    parser.add_argument("--sampled", action="store_true", help="rollouts, not text, of MODEL")
    parser.add_argument("--pretrained", type=Path, help="a directory that transformers loads")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(MODELS)}")
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    text, names = read_text(), options.models or ([] if options.pretrained else list(MODELS))
    for name in names:
        size, outliers, library, count = MODELS[name]
        sampled = options.sampled
        model = text_model(name, size, text, options.keep, outliers=outliers, sampled=sampled)
        _report(model, library, count, options)
    if options.pretrained:
        _report(pretrained(options.pretrained, text), *_PRETRAINED, options)


def _report(model: Model, library: int, count: int, options: argparse.Namespace) -> None:
    scaled = max(1, int(options.scale * count))
    print(json.dumps(measure(model, library, scaled, options.honest, options.keep)), flush=True)


if __name__ == "__main__":
    main()
