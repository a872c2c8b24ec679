"""`runspec relay`: a volunteer's relay, which the coordinator probes and lists for workers."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runspec.cli.machines import own_key, say, whole_link
from runspec.core.address import parse_address, parse_join_link, reachable
from runspec.core.errors import UserError, one_line
from runspec.core.process import setup_logging
from runspec.core.schema.fields import SIZE

if TYPE_CHECKING:
    from verify.client import CoordinatorClient

FOLDER = Path("relay")
EVERY_S = 60.0
SOON_S = 5.0
"""Seconds until the next registration while the relay is not listed."""


def relay_command(
    link: Annotated[str, typer.Argument(metavar="LINK", help="The run's join link.")],
    url: Annotated[str, typer.Option("--url", help="Where workers reach this relay.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where it listens.")],
    key: Annotated[Path, typer.Option("--key", help="Yours; made where there is none.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keeps versions.", show_default="relay/RUN")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="On disk, such as 500GB.")
    ] = None,
) -> int:
    """Serves a run's weights to its workers until Ctrl-C; returns the exit code 0."""
    from broadcast.relay import run_relay
    from broadcast.server import ServerOptions
    from broadcast.transport import base_url
    from verify import PERSON_S
    from verify.client import CoordinatorClient

    whole = whole_link(parse_join_link(link), link, None, None)
    assert whole.run is not None and whole.root is not None, "the link is whole"
    url = base_url(url)
    try:
        most = None if max_bytes is None else int(SIZE.parse(max_bytes))
    except ValueError as error:
        raise UserError(str(error), place="--max-bytes") from error
    options = ServerOptions(listen=parse_address(listen))
    client = CoordinatorClient(
        *(whole.coordinator, own_key(key)),
        run=whole.run,
        root_public_key=whole.root,
        deadline_s=PERSON_S,
    )
    spec = client.spec()
    if spec.broadcast.volunteers == "none":
        raise UserError(
            f"run {spec.name} takes no relays of volunteers",
            place=whole.coordinator,
            remedy="its operator can set broadcast.volunteers",
        )
    registering = threading.Thread(target=_register, args=(client, url), daemon=True)
    asyncio.run(
        run_relay(
            (folder or FOLDER / whole.run).absolute(),
            run=whole.run,
            root_public_key=whole.root,
            upstreams=[reachable(each, whole) for each in client.site().weights],
            keep_versions=spec.broadcast.keep_versions,
            log=setup_logging("relay"),
            started=lambda port: registering.start(),
            max_bytes=most,
            options=options,
        )
    )
    say("left; thank you")
    return 0


def _register(client: CoordinatorClient, url: str) -> None:
    """Registers again and again, and prints what the coordinator says of the relay where it is
    news."""
    last = ""
    while True:
        try:
            found = client.register_relay(url)
            line, pause_s = words_of(found), EVERY_S if found.get("listed") is True else SOON_S
        except UserError as error:
            line, pause_s = str(error), EVERY_S
        if line != last:
            say(line)
        last = line
        time.sleep(pause_s)


def words_of(answer: dict[str, Any]) -> str:
    """Return what the coordinator answered to a registration, for a person."""
    rate = answer.get("bytes_per_s")
    if answer.get("listed") is True and isinstance(rate, int | float):
        return f"serving, {rate / 1e6:.0f} MB/s measured"
    return f"not listed: {one_line(str(answer.get('reason')), 200)}"
