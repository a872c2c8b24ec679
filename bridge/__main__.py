"""The publisher, and `python -m bridge export | import | verify | check | diff | apply`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.object_store import folder_at
from runspec.core.process import Role, stop_event


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done (verify: the same), 1 a UserError or a difference, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python -m bridge", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, purpose: str, run: Callable[..., int | None], *paths: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=purpose)
        added.set_defaults(run_command=run)
        for path in paths:
            added.add_argument(path.lower(), metavar=path, type=Path)
        return added

    export = command("export", "Orbax checkpoint -> Hugging Face directory", _export)
    export.add_argument("ckpt", metavar="CKPT", help="a folder, or s3:// or gs://")
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument(
        "--model-dir", type=Path, help="has config and tokenizer; default: in CKPT, or beside it"
    )
    export.add_argument("--dtype", help="float32 or bfloat16; default: what the config says")

    command("import", "Hugging Face directory -> Orbax checkpoint", _import, "HF_DIR", "CKPT")
    command("verify", "compare two Hugging Face directories by digest", _verify, "A", "B")
    check = command("check", "check a model that `runspec export` made", _check, "HF_DIR")
    check.add_argument("--run", required=True, help="name of the run")
    check.add_argument("--public-key", required=True, metavar="HEX", help="the run's root key")
    diff = command(
        "diff", "count the elements that changed, and write the delta", _diff, "OLD", "NEW"
    )
    diff.add_argument("--out", type=Path, help="where to write the delta; default: nowhere")

    command("apply", "a version and a delta -> the next version", _apply, "BASE", "DELTA", "OUT")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return arguments.run_command(arguments) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# numpy and TensorStore are imported by the command that needs them, so that --help is quick.


def publish(role: Role, log: logging.Logger) -> None:
    """Publish each new policy version of a run until told to end."""
    from bridge.publisher import Publisher, publish_versions
    from runspec.core.metrics import serve_metrics

    publisher = Publisher(role.folder, role.spec, log)
    serve_metrics(role.figures, publisher.figures, log)
    publish_versions(publisher, stop_event())


def _export(arguments: argparse.Namespace) -> None:
    from bridge.conversion import export_checkpoint
    from bridge.model_files import model_directory, stated_dtype

    checkpoint = folder_at(arguments.ckpt)
    model_dir = arguments.model_dir or model_directory(checkpoint)
    export_checkpoint(
        checkpoint,
        arguments.out,
        model_dir=model_dir,
        dtype=arguments.dtype or stated_dtype(model_dir),
    )


def _import(arguments: argparse.Namespace) -> None:
    from bridge.conversion import import_model

    import_model(arguments.hf_dir, arguments.ckpt)


def _verify(arguments: argparse.Namespace) -> int:
    from bridge.conversion import differences

    lines = differences(arguments.a, arguments.b)
    for line in lines:
        print(line)
    print("the same weights" if not lines else f"{len(lines)} differences")
    return 1 if lines else 0


def _check(arguments: argparse.Namespace) -> None:
    from bridge.model_files import check_signed

    found = check_signed(arguments.hf_dir, run=arguments.run, root_public_key=arguments.public_key)
    print(f"version {found.version} of {found.run}, as it was published: {found.model_digest}")


def _diff(arguments: argparse.Namespace) -> None:
    from bridge.conversion import change_report

    for line in change_report(arguments.old, arguments.new, arguments.out):
        print(line)


def _apply(arguments: argparse.Namespace) -> None:
    from bridge.conversion import next_version

    next_version(arguments.base, arguments.delta, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
