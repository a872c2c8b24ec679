"""`python -m runspec.role NAME FOLDER`: one process of a run, from the files of its folder."""

from __future__ import annotations

import argparse
import logging
from importlib import import_module
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import Role, leave, not_retried, run_role, setup_logging
from runspec.core.schema.role_names import DRAWN, WARM_START

STARTS = {
    "origin": "broadcast.__main__:serve_origin",
    "shares": "broadcast.__main__:serve_origin",
    "relay": "broadcast.__main__:serve_relay",
    "coordinator": "verify.__main__:coordinate",
    "publisher": "bridge.__main__:publish",
    "learner": "learner_jax.__main__:learn",
    WARM_START: "learner_jax.__main__:warm_start",
    DRAWN: "learner_jax.__main__:draw",
    "validator": "verify.__main__:validate",
    "evaluator": "sampler.__main__:evaluate",
    "monitor": "runspec.local.monitors.follow:monitor",
    "worker": "sampler.__main__:work",
}
"""The function of each kind of role: it takes the `Role` and the role's log."""


def main(arguments: list[str] | None = None) -> int:
    """Run a role until it ends; return its exit code (`run_role`)."""
    parser = argparse.ArgumentParser(prog="python -m runspec.role", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="as `runspec status` shows it")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the run directory, or its own")
    parser.add_argument("--listen", metavar="HOST:PORT", help="if it is reached at another address")
    parser.add_argument("--key", type=Path, metavar="FILE", help="in place of the folder's")
    options = parser.parse_args(arguments)

    def body(log: logging.Logger) -> None:
        with not_retried():
            role = Role.load(
                options.name, options.folder, listen=options.listen, key_file=options.key
            )
            kind = role.kind
            if kind not in STARTS:
                raise UserError(f"no role {role.name!r}", place=str(role.folder))
        labels = {"shares": "origin", "monitor": role.name, "worker": f"sampler {role.pool}"}
        module, _, function = STARTS[kind].partition(":")
        getattr(import_module(module), function)(role, setup_logging(labels.get(kind, kind)))

    return run_role(options.name, body)


if __name__ == "__main__":
    leave(main())
