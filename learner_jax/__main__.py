"""The learner's process, its warm start, and `python -m learner_jax`: tools for a person."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runspec.core.address import is_loopback
from runspec.core.process import Role, address, run_role, stop_event
from runspec.core.run_files import island_folder, warm_start_cache
from runspec.core.schema.role_names import island_role, island_spec, shares_name

if TYPE_CHECKING:
    from learner_jax.distributed import IslandLink

LOCAL_HEARTBEAT_S = 10
"""Silence that ends the other processes of a learner on one machine, where no network is slow."""


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m learner_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
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
    again = commands.add_parser("replay", help="train steps again and compare the full states")
    again.add_argument("run_dir", type=Path, help="run directory, of a live run or a copy")
    again.add_argument("what", metavar="STEP|A-B|sample:K", help="between kept full states")
    again.add_argument("--json", dest="as_json", action="store_true", help="a JSON object a line")
    check = commands.add_parser(
        "check", help="open the documents of DIR/spec.json; prints JSON for `runspec lint --data`"
    )
    check.add_argument("folder", type=Path, metavar="DIR", help="of a run, or with a spec.json")
    _add_tokenizer(commands)
    options = parser.parse_args(arguments)
    return run_role(options.command, lambda log: _run(options, log))


_SEQUENCES = "documents: text, JSON lines, Parquet, FASTA or FASTQ, plain or gzip"


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
    values = vars(options)
    command = values.pop("command")
    # Imported here, so that --help waits for no JAX.
    if command == "aot":
        from learner_jax.aot_command import aot_command

        aot_command(**values)
    elif command == "export-adapter":
        from learner_jax.full_states import export_adapter

        step = export_adapter(options.run_dir, options.out, step=options.step)
        log.info("adapters after step %d are in %s", step, options.out)
    elif command == "check":
        from learner_jax.corpus.sources import check_command

        check_command(options.folder)
    elif command == "replay":
        from learner_jax.replay import replay_command

        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of each load, at length
        replay_command(log=log, **values)
    elif command == "tokenizer":
        from learner_jax.corpus.tokenizer import tokenizer_command

        del values["action"]
        tokenizer_command(log=log, **values)
    elif command == "score" and options.files is None:
        from learner_jax.score import score_command

        given = (options.model_dir, options.tokens, log)
        score_command(*given, dtype=options.dtype, mesh=options.mesh, out=options.out)
    else:
        from learner_jax.score import Options, embed_sequences, score_sequences

        names = (each.name for each in dataclasses.fields(Options))
        sequences = Options(**{name: values[name] for name in names})
        if command == "embed":
            embed_sequences(sequences, options.out, options.names, log)
        else:
            score_sequences(sequences, options.out, log)


def learn(role: Role, log: logging.Logger, *, join_s: int = 300, heartbeat_s: int = 60) -> None:
    """Train every step that is left, as one process of the learner or of an island.

    Args:
        role: the process.
        log: the role's.
        join_s: seconds to wait for the other processes of the program.
        heartbeat_s: seconds of silence that mean death, where the others are on other machines.
    """
    from learner_jax.compile_cache import cache_folder, keep_compiled
    from learner_jax.distributed import joined
    from learner_jax.islands.mirror import prepare_folder
    from learner_jax.train import train

    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of each save, at length
    island, names, meeting = role.program()
    link, folder, own = None, role.folder, role.spec
    if island is not None:
        link, own = _link(role, island, names), island_spec(role.spec, island)
        if names[0] != "learner":
            folder = island_folder(role.folder, island_role(island))
        prepare_folder(folder, link, log)
    keep_compiled(cache_folder(role.spec))
    at, index = None, None
    if meeting is not None:
        host, port = address(meeting)
        at, index = f"{host}:{port}", names.index(role.name)
        heartbeat_s = LOCAL_HEARTBEAT_S if is_loopback(host) else heartbeat_s
    with joined(own.learner.hosts, at, index, log, join_s=join_s, heartbeat_s=heartbeat_s) as peers:
        # Not before: joining puts JAX's own handler in SIGTERM's place.
        train(folder, log, stop_event(), peers, link, role.figures)


def _link(role: Role, island: str, names: list[str]) -> IslandLink:
    """The island that a process is of; the first one knows how it finds the others."""
    from learner_jax.distributed import IslandLink

    if role.name != names[0]:
        return IslandLink(island)
    ends, shares = role.endpoints, shares_name(island)
    return IslandLink(
        island,
        ends.coordinator,
        role.folder / "keys" / f"{island_role(island)}.key",
        ends.public.get(shares, ends.shares[island]),
        role.folder / "store" / shares,
        () if role.name == "learner" else tuple(role.weights()),
        role.root_public_key,
    )


def warm_start(role: Role, log: logging.Logger) -> None:
    """Make version 0 by supervised steps, or find it in the cache beside the runs."""
    from learner_jax.warm_start import make_initial_model

    make_initial_model(role.folder, warm_start_cache(role.folder), log)


def draw(role: Role, log: logging.Logger) -> None:
    """Make version 0 of random weights, from the run's seed."""
    from learner_jax.warm_start import draw_initial_model

    draw_initial_model(role.folder, log)


if __name__ == "__main__":
    sys.exit(main())
