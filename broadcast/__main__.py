"""`python -m broadcast keygen | publish | origin | relay | fetch`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from runspec.core.errors import UserError

if TYPE_CHECKING:
    from broadcast.server import ServerOptions
    from runspec.core.process import Role


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 UserError, 2 bad usage, 3 internal error, 130 interrupted."""
    from runspec.core.process import run_role

    arguments = _parser().parse_args(argv)
    try:
        return run_role(arguments.command, lambda log: arguments.run_command(arguments, log))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m broadcast", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    keygen = commands.add_parser("keygen", help="root key, role keys and a signed roles.json")
    keygen.add_argument("directory", metavar="DIR", type=Path)
    keygen.add_argument("--run", metavar="ID", help="the run; default: the name of DIR")
    keygen.add_argument("--validators", metavar="N", type=_natural, default=1)
    keygen.add_argument(
        "--renew",
        metavar="NAME",
        nargs="*",
        help="revoke these keys of DIR (publisher, validator-0) for new ones, and sign roles.json",
    )
    keygen.set_defaults(run_command=_keygen)

    publish = commands.add_parser("publish", help="publish the files of DIR as a version")
    publish.add_argument("store", metavar="STORE", type=Path)
    publish.add_argument("directory", metavar="DIR", type=Path)
    publish.add_argument("--run", metavar="ID", required=True)
    publish.add_argument("--version", metavar="N", type=_natural, required=True)
    publish.add_argument(
        "--key", type=Path, required=True, help="a publisher's key, with roles.json beside it"
    )
    publish.add_argument(
        "--base", metavar="M", type=_natural, help="version that DIR/delta is applied to"
    )
    publish.add_argument(
        "--delta-only", action="store_true", help="with --base: publish the delta without the files"
    )
    publish.set_defaults(run_command=_publish)

    origin = commands.add_parser("origin", help="serve a store")
    origin.add_argument("store", metavar="STORE", type=Path)
    _add_server(origin)
    origin.set_defaults(run_command=_origin)

    relay = commands.add_parser("relay", help="mirror a run and serve it")
    relay.add_argument("--run", metavar="ID", required=True)
    relay.add_argument("--upstream", metavar="URL", nargs="+", action="extend", required=True)
    relay.add_argument("--store", metavar="DIR", type=Path, required=True)
    relay.add_argument("--public-key", metavar="PUB", required=True, help="the root's: hex or file")
    relay.add_argument("--keep-versions", metavar="N", type=_positive, default=5)
    relay.add_argument("--max-bytes", metavar="SIZE", type=_size, help="on disk, such as 500GB")
    _add_access(relay, "--upstream-")
    _add_server(relay)
    relay.set_defaults(run_command=_relay)

    fetch = commands.add_parser("fetch", help="fetch and check a version, into DIR/v<N>")
    fetch.add_argument("urls", metavar="URL", nargs="+")
    fetch.add_argument("--run", metavar="ID", required=True)
    fetch.add_argument("--out", metavar="DIR", type=Path, required=True)
    fetch.add_argument("--version", metavar="N|latest", type=_version)
    fetch.add_argument("--public-key", metavar="PUB", required=True, help="the root's: hex or file")
    fetch.add_argument("--deadline", metavar="SECONDS", type=_seconds, default=600.0)
    _add_access(fetch, "--")
    fetch.set_defaults(run_command=_fetch)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="HOST:PORT", required=True)
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="a line NAME TOKEN for each reader"
    )
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key, PEM")
    parser.add_argument(
        "--rate-limit", metavar="RATE", type=_rate, help="for each client: 500Mbit/s or 50MB/s"
    )
    parser.add_argument("--max-connections", metavar="N", type=_positive, default=4096)


def _add_access(parser: argparse.ArgumentParser, prefix: str) -> None:
    parser.add_argument(
        f"{prefix}token-file", metavar="FILE", type=Path, help="file with the token to send"
    )
    parser.add_argument(
        f"{prefix}ca-file", metavar="FILE", type=Path, help="PEM; default: the system's"
    )


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    if (number := _natural(text)) == 0:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return number


def _version(text: str) -> int | None:
    return None if text == "latest" else _natural(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _size(text: str) -> int:
    from runspec.core.schema.fields import SIZE

    return _quantity(text, SIZE.parse)


def _rate(text: str) -> int:
    """Return a rate in bytes per second."""
    from runspec.core.schema.fields import RATE

    return _quantity(text, lambda rate: RATE.parse(rate) / 8)


def _quantity(text: str, parse: Callable[[str], float]) -> int:
    try:
        return max(1, int(parse(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Each command imports its modules itself, so that --help is quick.


def _keygen(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.layout import make_keys, renew_keys

    if arguments.renew is not None:
        renew_keys(arguments.directory, arguments.renew)
        return
    run = arguments.run or arguments.directory.resolve().name
    print(make_keys(arguments.directory, run=run, validators=arguments.validators))


def _publish(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.layout import roles_name
    from broadcast.store import publish
    from runspec.core.files import read_bounded
    from runspec.core.roles import MAX_BYTES
    from runspec.core.signed import SigningKey

    if arguments.delta_only and arguments.base is None:
        raise UserError("--delta-only needs --base: without one there is no delta")
    beside = arguments.key.with_name("roles.json")
    stored = arguments.store / roles_name(arguments.run)
    path = beside if beside.exists() else stored
    if not path.exists():
        raise UserError(
            f"no roles.json here or at {beside}",
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
        whole=not arguments.delta_only,
    )
    print(digest)


def serve_origin(role: Role, log: logging.Logger) -> None:
    """Serve the store of a run's weights, or of an island's shares."""
    from broadcast.relay import run_origin
    from broadcast.server import ServerOptions

    asyncio.run(run_origin(role.store, log=log, options=ServerOptions(listen=role.address)))


def serve_relay(role: Role, log: logging.Logger) -> None:
    """Mirror a run and serve it, as one of its relays."""
    from broadcast.relay import run_relay
    from broadcast.server import ServerOptions

    asyncio.run(
        run_relay(
            role.store,
            run=role.spec.name,
            upstreams=role.upstreams(),
            root_public_key=role.root_public_key,
            keep_versions=role.spec.broadcast.keep_versions,
            log=log,
            options=ServerOptions(listen=role.address),
        )
    )


def _origin(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.relay import run_origin

    asyncio.run(run_origin(arguments.store, log=log, options=_server_options(arguments)))


def _relay(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.relay import run_relay
    from broadcast.transport import Access

    asyncio.run(
        run_relay(
            arguments.store,
            run=arguments.run,
            upstreams=arguments.upstream,
            root_public_key=_public_key(arguments.public_key),
            keep_versions=arguments.keep_versions,
            max_bytes=arguments.max_bytes,
            access=Access.read(arguments.upstream_token_file, arguments.upstream_ca_file),
            log=log,
            options=_server_options(arguments),
        )
    )


def _fetch(arguments: argparse.Namespace, log: logging.Logger) -> None:
    from broadcast.client import WeightsClient
    from broadcast.transport import Access

    deadline = time.monotonic() + arguments.deadline
    version = arguments.version
    with WeightsClient(
        arguments.urls,
        run=arguments.run,
        root_public_key=_public_key(arguments.public_key),
        cache_dir=arguments.out,
        access=Access.read(arguments.token_file, arguments.ca_file),
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


def _server_options(arguments: argparse.Namespace) -> ServerOptions:
    from broadcast.server import ServerOptions
    from runspec.core.address import parse_address

    return ServerOptions(
        listen=parse_address(arguments.listen),
        tokens_file=arguments.token_file,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        rate_limit=arguments.rate_limit,
        max_connections=arguments.max_connections,
    )


def _public_key(text: str) -> str:
    """Return a public key: `text` itself (64 hexadecimal characters), or the contents of a file."""
    from runspec.core.canonical import is_digest
    from runspec.core.files import read_bounded

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
