"""The publisher, and `python -m bridge export | import | verify | check | diff | apply`."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import folder_at
from runspec.core.process import Role, stop_event


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done (verify: the same), 1 a UserError or a difference, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python -m bridge", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, purpose: str, *paths: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=purpose)
        for path in paths:
            added.add_argument(path.lower(), metavar=path, type=Path)
        return added

    export = command("export", "Orbax checkpoint -> Hugging Face directory")
    export.add_argument("ckpt", metavar="CKPT", help="a folder, or s3:// or gs://")
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument(
        "--model-dir", type=Path, help="has config and tokenizer; default: in CKPT, or beside it"
    )
    export.add_argument("--dtype", help="float32 or bfloat16; default: what the config says")

    command("import", "Hugging Face directory -> Orbax checkpoint", "HF_DIR", "CKPT")
    command("verify", "compare two Hugging Face directories by digest", "A", "B")
    check = command("check", "check a model that `runspec export` made", "HF_DIR")
    check.add_argument("--run", required=True, help="name of the run")
    check.add_argument("--public-key", required=True, metavar="HEX", help="the run's root key")
    diff = command("diff", "count the elements that changed, and write the delta", "OLD", "NEW")
    diff.add_argument("--out", type=Path, help="where to write the delta; default: nowhere")

    command("apply", "a version and a delta -> the next version", "BASE", "DELTA", "OUT")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> int:
    """Run a command; return 1 where `verify` finds a difference, else 0."""
    # Imported here, so that --help is quick: they import numpy and TensorStore.
    from bridge import conversion, model_files

    match given.command:
        case "export":
            checkpoint = folder_at(given.ckpt)
            model_dir = given.model_dir or model_files.model_directory(checkpoint)
            dtype = given.dtype or model_files.stated_dtype(model_dir)
            conversion.export_checkpoint(checkpoint, given.out, model_dir=model_dir, dtype=dtype)
        case "import":
            conversion.import_model(given.hf_dir, given.ckpt)
        case "verify":
            lines = conversion.differences(given.a, given.b)
            print(*lines, f"{len(lines)} differences" if lines else "the same weights", sep="\n")
            return 1 if lines else 0
        case "check":
            root = given.public_key
            found = model_files.check_signed(given.hf_dir, run=given.run, root_public_key=root)
            published = f"as it was published: {found.model_digest}"
            print(f"version {found.version} of {found.run}, {published}")
        case "diff":
            for line in conversion.change_report(given.old, given.new, given.out):
                print(line)
        case "apply":
            conversion.next_version(given.base, given.delta, given.out)
    return 0


def publish(role: Role, log: logging.Logger) -> None:
    """Publish each new policy version of a run until told to end."""
    from bridge.publisher import Publisher, publish_versions
    from bridge.states import StatePublisher
    from runspec.core.http_server import serve_metrics

    publisher, stop = Publisher(role.folder, role.spec, log), stop_event()
    serve_metrics(role.figures, publisher.figures, log)
    with ExitStack() as beside:
        if role.spec.audit is not None:
            states = StatePublisher(role.folder, role.spec, publisher.signing, log)
            beside.enter_context(states.following(stop))
        publish_versions(publisher, stop)


if __name__ == "__main__":
    sys.exit(main())
