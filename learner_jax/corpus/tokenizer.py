"""Tokenizers that are trained on documents: `python -m learner_jax tokenizer`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bridge.model_files import output_directory
from learner_jax.corpus import Counts, Document, Kind, read_all, reported
from runspec.core.errors import UserError
from runspec.core.models import made_tokenizer_files

Scheme = Literal["nucleotides", "text"]
_SPECIAL: dict[Scheme, dict[str, str]] = {
    "nucleotides": {
        kind: f"[{kind.upper()}]" for kind in ("pad", "unk", "sep", "bos", "eos", "mask")
    },
    "text": {kind: f"<|{kind}|>" for kind in ("pad", "bos", "eos")},
}
"""Special tokens by kind, in the order of their ids, from 0."""
_BASES = "_ACGTN"
"""Single tokens of `nucleotides`, in the order of their ids, after the special tokens."""


def train_tokenizer(documents: Iterable[str], vocab: int, scheme: Scheme) -> Tokenizer:
    """Train a BPE tokenizer of exactly `vocab` tokens, which transformers and vLLM load.

    The scheme `nucleotides` is METAGENE-1's (arXiv 2501.02045, section 3.2, and its released
    tokenizer.json): the same special tokens and bases with the same ids, and merges within a
    sequence. The scheme `text` is byte-level BPE, in which every decimal digit is a token of its
    own.

    Raises:
        UserError: the vocabulary is smaller than the alphabet, or larger than the documents allow.
    """
    nucleotides = scheme == "nucleotides"
    special = list(_SPECIAL[scheme].values())
    alphabet = list(_BASES) if nucleotides else pre_tokenizers.ByteLevel.alphabet()
    if vocab < (least := len(special) + len(alphabet)):
        raise UserError(
            f"{vocab} tokens; special tokens and alphabet of {scheme} are {least}",
            place="--vocab",
            remedy=f"ask for {least} or more",
        )
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]" if nucleotides else None))
    if nucleotides:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (found := tokenizer.get_vocab_size()) != vocab:
        raise UserError(
            f"{vocab} tokens; the documents give {found}",
            place="--vocab",
            remedy="add documents, or ask for fewer",
        )
    if nucleotides:
        state = json.loads(tokenizer.to_str())  # the trainer sorts the bases; a release has ids
        state["model"]["vocab"] |= {base: len(special) + i for i, base in enumerate(_BASES)}
        tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[BOS] $A [EOS]",
            special_tokens=[(name, special.index(name)) for name in ("[BOS]", "[EOS]")],
        )
    return tokenizer


def tokenizer_command(
    files: Sequence[Path],
    out: Path,
    log: logging.Logger,
    *,
    vocab: int,
    scheme: Scheme,
    kind: Kind | None,
    column: str,
    max_characters: int,
) -> None:
    """Train a tokenizer on files, and write its folder.

    Args:
        files: read in this order, up to `max_characters`.
        out: a new folder.
        log: receives progress and the counts.
        vocab: number of tokens, special ones included.
        scheme: see `train_tokenizer`.
        kind: kind of the files; by default what their names say.
        column: field or column that holds the text.
        max_characters: what is beyond is left out.

    Raises:
        UserError: a file cannot be read, `out` exists, or the vocabulary does not fit.
    """
    counts = Counts()
    documents = read_all(files, counts, kind=kind, column=column)
    texts = reported(_limited(documents, counts, max_characters), counts, log)
    with output_directory(out) as folder:
        tokenizer = train_tokenizer(texts, vocab, scheme)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        special = {f"{kind}_token": token for kind, token in _SPECIAL[scheme].items()}
        for name, text in made_tokenizer_files(special).items():
            (folder / name).write_text(text, encoding="utf-8")
    log.info("%s has %d tokens", out, vocab)


def _limited(documents: Iterable[Document], counts: Counts, characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters."""
    for document in documents:
        yield document.value
        if counts.characters >= characters:
            return
