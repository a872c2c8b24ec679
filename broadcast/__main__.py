"""`python -m broadcast keygen | publish | origin | relay | fetch`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from runspec.common.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a UserError, 2 bad usage, 3 a fault of our own."""
    from runspec.common.process import run_role

    arguments = _parser().parse_args(argv)
    return run_role(arguments.command, lambda log: arguments.run_command(arguments, log))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m broadcast", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    keygen = commands.add_parser("keygen", help="root key, role keys and a signed roles.json")
    keygen.add_argument("directory", metavar="DIR", type=Path)
    keygen.add_argument("--run", metavar="ID", help="the run; default: the name of DIR")
    keygen.add_argument("--validators", metavar="N", type=int, default=1)
    keygen.set_defaults(run_command=_keygen)

    publish = commands.add_parser("publish", help="publish the files of DIR as a version")
    publish.add_argument("store", metavar="STORE", type=Path)
    publish.add_argument("directory", metavar="DIR", type=Path)
    publish.add_argument("--run", metavar="ID", required=True)
    publish.add_argument("--version", metavar="N", type=int, required=True)
    publish.add_argument("--key", type=Path, required=True, help="a publisher's; roles.json beside")
    publish.add_argument("--base", metavar="M", type=int, help="version that DIR's deltas are from")
    publish.set_defaults(run_command=_publish)

    origin = commands.add_parser("origin", help="serve a store")
    origin.add_argument("store", metavar="STORE", type=Path)
    origin.add_argument("--listen", metavar="HOST:PORT", required=True)
    origin.set_defaults(run_command=_origin)

    relay = commands.add_parser("relay", help="mirror a run and serve it on")
    relay.add_argument("--run", metavar="ID", required=True)
    relay.add_argument("--upstream", metavar="URL", nargs="+", action="extend", required=True)
    relay.add_argument("--store", metavar="DIR", type=Path, required=True)
    relay.add_argument("--listen", metavar="HOST:PORT", required=True)
    relay.add_argument("--public-key", metavar="PUB", required=True, help="the root's: hex or file")
    relay.add_argument("--keep-versions", metavar="N", type=int, default=5)
    relay.set_defaults(run_command=_relay)

    fetch = commands.add_parser("fetch", help="fetch a version to DIR/v<N>, checked")
    fetch.add_argument("urls", metavar="URL", nargs="+")
    fetch.add_argument("--run", metavar="ID", required=True)
    fetch.add_argument("--out", metavar="DIR", type=Path, required=True)
    fetch.add_argument("--version", metavar="N|latest", default="latest")
    fetch.add_argument("--public-key", metavar="PUB", required=True, help="the root's: hex or file")
    fetch.add_argument("--deadline", metavar="SECONDS", type=float, default=600.0)
    fetch.set_defaults(run_command=_fetch)
    return parser


# The servers' and the client's imports are made by the command that needs them: --help is quick.


def _keygen(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.keygen import make_keys

    run = arguments.run or arguments.directory.resolve().name
    print(make_keys(arguments.directory, run=run, validators=arguments.validators))


def _publish(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.layout import roles_name
    from broadcast.store import publish
    from runspec.common.files import read_bounded
    from runspec.common.keys import SigningKey
    from runspec.common.roles import MAX_BYTES

    beside = arguments.key.with_name("roles.json")
    stored = arguments.store / roles_name(arguments.run)
    path = beside if beside.exists() else stored
    if not path.exists():
        raise UserError(
            f"no roles.json, neither here nor at {beside}",
            place=str(stored),
            remedy="make one with `python -m broadcast keygen DIR`",
        )
    digest = publish(
        arguments.store,
        arguments.directory,
        run=arguments.run,
        version=arguments.version,
        key=SigningKey.load(arguments.key),
        roles=read_bounded(path, MAX_BYTES),
        base=arguments.base,
    )
    print(digest)


def _origin(arguments: argparse.Namespace, log: logging.Logger) -> None:
    import asyncio

    from broadcast.origin import run_origin
    from runspec.common.address import parse_address

    host, port = parse_address(arguments.listen)
    asyncio.run(run_origin(arguments.store, host=host, port=port, log=log))


def _relay(arguments: argparse.Namespace, log: logging.Logger) -> None:
    import asyncio

    from broadcast.relay import run_relay
    from runspec.common.address import parse_address

    host, port = parse_address(arguments.listen)
    asyncio.run(
        run_relay(
            arguments.store,
            run=arguments.run,
            upstreams=arguments.upstream,
            root_public_key=_public_key(arguments.public_key),
            keep_versions=arguments.keep_versions,
            host=host,
            port=port,
            log=log,
        )
    )


def _fetch(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.client import WeightsClient

    deadline = time.monotonic() + arguments.deadline
    version = None if arguments.version == "latest" else _version(arguments.version)
    with WeightsClient(
        arguments.urls,
        run=arguments.run,
        root_public_key=_public_key(arguments.public_key),
        cache_dir=arguments.out,
    ) as client:
        digest = None
        if version is None:
            newest = client.latest(None, arguments.deadline)
            if newest is None:
                raise UserError(
                    f"nothing published within {arguments.deadline:.0f} s",
                    place=", ".join(arguments.urls),
                )
            version, digest = newest.version, newest.manifest_digest
        path = client.fetch(version, manifest_digest=digest, deadline_s=deadline - time.monotonic())
    print(path)


def _version(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--version {text!r} is neither a number nor `latest`")
    return int(text)


def _public_key(text: str) -> str:
    """A public key: 64 hexadecimal characters, or a file that holds them."""
    from runspec.common.files import read_bounded
    from runspec.common.hashing import is_digest

    if is_digest(text):
        return text
    try:
        key = read_bounded(Path(text), 1024).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--public-key: neither a key nor a file: {error}") from error
    if not is_digest(key):
        raise UserError("holds no public key of 64 hexadecimal characters", place=text)
    return key


if __name__ == "__main__":
    sys.exit(main())
