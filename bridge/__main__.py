"""`python -m bridge export | import | verify`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from runspec.common.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done (verify: the same), 1 a UserError or a difference, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python -m bridge", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    export = commands.add_parser("export", help="Orbax checkpoint -> Hugging Face directory")
    export.add_argument("checkpoint", metavar="CKPT", type=Path)
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument("--model-dir", type=Path, required=True, help="has config and tokenizer")
    export.add_argument("--dtype", required=True, help="float32 or bfloat16")

    load = commands.add_parser("import", help="Hugging Face directory -> Orbax checkpoint")
    load.add_argument("hf_dir", metavar="HF_DIR", type=Path)
    load.add_argument("checkpoint", metavar="CKPT", type=Path)

    verify = commands.add_parser("verify", help="compare two Hugging Face directories by digest")
    verify.add_argument("first", metavar="A", type=Path)
    verify.add_argument("second", metavar="B", type=Path)

    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _COMMANDS[arguments.command](arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# numpy and TensorStore are imported by the command that needs them, so that --help is quick.


def _export(arguments: argparse.Namespace) -> int:
    from bridge.export import export_checkpoint

    export_checkpoint(
        arguments.checkpoint, arguments.out, model_dir=arguments.model_dir, dtype=arguments.dtype
    )
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from bridge.config import load_config
    from bridge.load import iter_leaves
    from bridge.orbax_io import write_checkpoint

    config = load_config(arguments.hf_dir)
    write_checkpoint(arguments.checkpoint, iter_leaves(arguments.hf_dir, config))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from bridge.compare import differences

    lines = differences(arguments.first, arguments.second)
    for line in lines:
        print(line)
    print("the same weights" if not lines else f"{len(lines)} differences")
    return 1 if lines else 0


_COMMANDS = {"export": _export, "import": _import, "verify": _verify}

if __name__ == "__main__":
    sys.exit(main())
