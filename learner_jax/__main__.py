"""`python -m learner_jax`: the learner's process, its warm start, and tools for a person."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runspec.core.errors import UserError
from runspec.core.process import run_role, stop_event

if TYPE_CHECKING:
    from learner_jax.learner_run import IslandLink


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m learner_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser(
        "warm-start", help="make version 0 by supervised steps, or reuse it"
    )
    start.add_argument("run_dir", type=Path, help="run directory with spec.json")
    start.add_argument("--cache", type=Path, required=True, help="where finished starts are kept")
    draw = commands.add_parser("draw", help="make version 0 of random weights, from the run's seed")
    draw.add_argument("run_dir", type=Path, help="run directory with spec.json and a tokenizer")
    train = commands.add_parser("train", help="train every step that is left, then exit 0")
    train.add_argument("run_dir", type=Path, help="run directory with spec.json and initial/")
    _add_train_options(train)
    aot = commands.add_parser(
        "aot", help="compile the run's programs for its hardware, without it; prints JSON"
    )
    aot.add_argument("run", type=Path, metavar="SPEC|RUN_DIR", help="a spec, or a run directory")
    aot.add_argument("--profile", help="overlay in profiles/ beside the spec")
    aot.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides")
    aot.add_argument("--topology", help="TPU slice, like v5p:4x4x4; else learner.hardware")
    aot.add_argument("--model-config", type=Path, help="config.json, in place of the spec's model")
    names = ("publish", "score", "accumulate", "apply")
    used = "by default those that the run uses"
    aot.add_argument("--programs", nargs="+", choices=names, help=used)
    score = commands.add_parser(
        "score", help="print the log-probs of given tokens under a Hugging Face model"
    )
    score.add_argument("model_dir", type=Path, metavar="HF_DIR", help="config.json, safetensors")
    given = score.add_mutually_exclusive_group(required=True)
    given.add_argument("--tokens", type=Path, help="a JSON list of token ids a line")
    given.add_argument(
        "--sequences", type=Path, nargs="+", dest="files", metavar="FILE", help=_SEQUENCES
    )
    _add_model_options(score)
    score.add_argument("--out", type=Path, help="a file in place of standard output")
    embed = commands.add_parser("embed", help="write mean hidden states of documents as .npy")
    embed.add_argument("model_dir", type=Path, metavar="HF_DIR", help="with its tokenizer.json")
    embed.add_argument(
        "--sequences",
        type=Path,
        nargs="+",
        dest="files",
        required=True,
        metavar="FILE",
        help=_SEQUENCES,
    )
    _add_model_options(embed)
    embed.add_argument("--out", type=Path, required=True, metavar="FILE.npy")
    embed.add_argument("--names", type=Path, help="a file for the documents' names, one a line")
    adapter = commands.add_parser(
        "export-adapter", help="write the adapters of a LoRA run as a PEFT directory"
    )
    adapter.add_argument("run_dir", type=Path, help="run directory with spec.json and initial/")
    adapter.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    adapter.add_argument("--step", type=int, help="of which full state; else the newest")
    check = commands.add_parser(
        "check", help="open the documents of DIR/spec.json; prints JSON for `runspec lint --data`"
    )
    check.add_argument("folder", type=Path, metavar="DIR", help="of a run, or with a spec.json")
    _add_tokenizer(commands)
    options = parser.parse_args(arguments)
    role = "learner" if options.command == "train" else options.command
    code = run_role(role, lambda log: _run(options, log))
    if code and options.command == "train":
        from learner_jax.distributed import leave

        leave(code)  # whoever it was waiting for, peers or a disk, it waits no longer
    return code


_SEQUENCES = "documents: text, JSON lines, Parquet, FASTA or FASTQ, plain or gzip"


def _add_train_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, where learner.hosts is above 1 and JAX cannot find out",
    )
    train.add_argument("--process", type=int, metavar="I", help="number of this one, from 0")
    train.add_argument(
        "--join", type=int, default=300, metavar="S", help="seconds to wait for the others to join"
    )
    train.add_argument(
        "--heartbeat", type=int, default=60, metavar="S", help="seconds of silence that mean death"
    )
    train.add_argument("--metrics", metavar="HOST:PORT", help="serves Prometheus metrics there")
    island = train.add_argument_group("a run with learner.islands")
    island.add_argument("--island", metavar="NAME", help="which island this is")
    island.add_argument("--coordinator-url", metavar="URL", help="of the run's coordinator")
    island.add_argument("--key", type=Path, metavar="FILE", help="signs the island's shares")
    island.add_argument("--share-url", metavar="URL", help="where others reach its shares")
    island.add_argument("--share-store", type=Path, metavar="DIR", help="what is served there")
    island.add_argument(
        "--weights",
        action="append",
        default=[],
        metavar="URL",
        help="of relays and origin, for an island without the run directory",
    )
    island.add_argument("--public-key", metavar="HEX", help="root key, for such an island")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="else that of the weights")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="else fsdp over all devices")
    parser.add_argument("--context", type=int, help="longest window in tokens; else the model's")
    _add_file_options(parser)


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        choices=["text", "jsonl", "parquet", "fasta", "fastq"],
        help="of the files; by default what each name says",
    )
    parser.add_argument("--column", default="text", help="of JSON lines and Parquet; default: text")


def _add_tokenizer(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tokenizer = commands.add_parser("tokenizer", help="make a tokenizer from files")
    actions = tokenizer.add_subparsers(dest="action", required=True)
    train = actions.add_parser("train", help="train a BPE tokenizer; writes a folder")
    train.add_argument("files", type=Path, nargs="+", metavar="FILE", help="plain or gzip")
    train.add_argument("-o", dest="out", type=Path, required=True, metavar="DIR", help="new folder")
    train.add_argument("--vocab", type=int, required=True, help="tokens, special ones included")
    train.add_argument(
        "--scheme",
        choices=["nucleotides", "text"],
        default="text",
        help="nucleotides: METAGENE-1's; text: bytes, each digit a token (default)",
    )
    _add_file_options(train)
    train.add_argument(
        "--max-characters",
        type=int,
        default=10**9,
        metavar="N",
        help="read no more documents after these; default: 1,000,000,000",
    )


def _run(options: argparse.Namespace, log: logging.Logger) -> None:
    # Imported here, so that --help waits for no JAX.
    def given(names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names.split()}

    if options.command == "train":
        _train(options, log)
    elif options.command == "aot":
        from learner_jax.aot_command import aot_command

        aot_command(**given("run programs profile overrides topology model_config"))
    elif options.command == "draw":
        from learner_jax.warm_start import draw_initial_model

        draw_initial_model(options.run_dir, log)
    elif options.command == "export-adapter":
        from learner_jax.full_states import export_adapter

        step = export_adapter(options.run_dir, options.out, step=options.step)
        log.info("adapters after step %d are in %s", step, options.out)
    elif options.command == "check":
        from learner_jax.corpus.sources import check_command

        check_command(options.folder)
    elif options.command == "tokenizer":
        from learner_jax.corpus.encoding import tokenizer_command

        shape = given("files out vocab scheme kind column max_characters")
        tokenizer_command(log=log, **shape)
    elif options.command == "embed" or (options.command == "score" and options.files):
        from learner_jax.score import Options, embed_sequences, score_sequences

        sequences = Options(**given(" ".join(each.name for each in dataclasses.fields(Options))))
        if options.command == "embed":
            embed_sequences(sequences, options.out, options.names, log)
        else:
            score_sequences(sequences, options.out, log)
    elif options.command == "score":
        from learner_jax.score import score_command

        score_command(log=log, **given("model_dir tokens dtype mesh out"))
    else:
        from learner_jax.warm_start import make_initial_model

        make_initial_model(options.run_dir, options.cache, log)


def _train(options: argparse.Namespace, log: logging.Logger) -> None:
    from learner_jax.compile_cache import cache_folder, keep_compiled
    from learner_jax.distributed import joined
    from learner_jax.islands.mirror import prepare_folder
    from learner_jax.train import train
    from runspec.core.schema.load import load_resolved
    from runspec.core.schema.role_names import island_spec

    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of each save, at length
    link = _link(options)
    if link is not None:
        prepare_folder(options.run_dir, link, log)
    spec = load_resolved(options.run_dir)
    own = spec if link is None else island_spec(spec, link.name)
    keep_compiled(cache_folder(spec))
    with joined(
        own.learner.hosts,
        options.coordinator,
        options.process,
        log,
        join_s=options.join,
        heartbeat_s=options.heartbeat,
    ) as peers:
        # Not before: joining puts JAX's own handler in SIGTERM's place.
        train(options.run_dir, log, stop_event(), peers, link, options.metrics)


def _link(options: argparse.Namespace) -> IslandLink | None:
    """The island that the command line names; None where it names none.

    Raises:
        UserError: an option is missing.
    """
    from learner_jax.learner_run import IslandLink

    if options.island is None:
        return None
    if options.process not in (None, 0):
        return IslandLink(options.island)
    needed = ["coordinator_url", "key", "share_url", "share_store"]
    needed += ["public_key"] if options.weights else []
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(options, name) is None]
    if missing:
        raise UserError(f"island {options.island} needs {', '.join(missing)}")
    return IslandLink(
        options.island,
        options.coordinator_url,
        options.key,
        options.share_url,
        options.share_store,
        tuple(options.weights),
        options.public_key,
    )


if __name__ == "__main__":
    sys.exit(main())
