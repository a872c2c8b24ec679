"""`runspec watch`: follows a run as a stranger, and trains some of its steps again."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from runspec.cli.machines import own_key, say, whole_link
from runspec.core.address import JoinLink, parse_address, parse_join_link
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.signed import SigningKey
from runspec.local.backend import StopSignals

FOLDER = Path("watch")
EVERY_S = 20.0
"""Seconds between two looks for states that were published since."""
COORDINATOR_S = 10.0
"""Seconds for which a coordinator may not answer; it is asked again at the next look."""
_STEP_S = 0.2


def watch_command(
    link: Annotated[str, typer.Argument(metavar="LINK", help="The run's join link.")],
    key: Annotated[Path, typer.Option("--key", help="Yours; made where there is none.")],
    share: Annotated[
        float, typer.Option("--share", min=0.0, max=1.0, help="Of the intervals, by chance.")
    ] = 0.1,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keeps findings.", show_default="watch/RUN")
    ] = None,
    serve: Annotated[
        str | None, typer.Option("--serve", help="HOST:PORT, where others read the findings.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Ends after what is there now.")] = False,
) -> int:
    """Watches a run until Ctrl-C; returns the exit code: 1 where an interval is refuted."""
    whole = whole_link(parse_join_link(link), link, None, None)
    folder = (folder or FOLDER / str(whole.run)).absolute()
    with StopSignals() as stops:
        watch = partial(_watch, whole, own_key(key), folder, share, stops, once=once)
        return watch() if serve is None else asyncio.run(_served(serve, folder, watch))


async def _served(address: str, folder: Path, watch: Callable[[], int]) -> int:
    """Watch in a thread, and serve the findings meanwhile."""
    from aiohttp import web

    from runspec.core.connection_limits import ConnectionLimits, Observer, answering
    from runspec.core.http_server import serving
    from verify.formats.findings import LIST_PATH, list_findings, stored_findings

    async def answer(_: web.Request) -> web.Response:
        found = await asyncio.to_thread(stored_findings, folder)
        return web.Response(body=list_findings(found.values()), content_type="application/json")

    application = web.Application(middlewares=[answering])
    application.router.add_get(LIST_PATH, answer)
    host, port = parse_address(address)
    limits = ConnectionLimits(connections=256, idle_s=75.0, head_s=30.0, header_bytes=8190)
    log = logging.getLogger(__name__)
    async with serving(application, (host, port), limits, Observer(), log) as (bound, _):
        say(f"findings at {host}:{bound}{LIST_PATH}")
        return await asyncio.to_thread(watch)


def _watch(
    link: JoinLink, key: SigningKey, folder: Path, share: float, stops: StopSignals, *, once: bool
) -> int:
    from bridge.fetched_states import open_states, replay_published  # with the learner's packages
    from verify.formats.findings import FILES, LONGEST_LINE, Finding, sign_finding

    chance, seen, code = random.SystemRandom(), set[tuple[int, int]](), 0
    unsent, told = set(folder.glob(FILES)), ""
    with tempfile.TemporaryDirectory(prefix="watch-") as work, open_states(link, Path(work)) as run:
        while not stops():
            try:
                # Drawn after their end is signed: nobody can know beforehand.
                for first, last in (each for each in run.look() if each not in seen):
                    seen.add((first, last))
                    path = folder / f"{first}-{last}.json"
                    if stops() or path.exists() or chance.random() >= share:
                        continue
                    outcome, line = replay_published(run, first, last)
                    ends = [run.history[number].manifest for number in (first, last)]
                    said = (ends, outcome, line[:LONGEST_LINE], share, time.time())
                    finding = Finding(str(link.run), first, last, *said)
                    write_atomic(path, sign_finding(finding, key))
                    unsent.add(path)
                    say(f"{line}; {path}")
                    code = max(code, int(outcome == "refuted"))
            except UserError as error:  # a server may be away for a while, or a state gone
                if once:
                    raise
                say(str(error))
            if (trouble := _hand_over(link, key, unsent)) != told:
                told = trouble
                say(f"{len(unsent)} findings lie here alone: {told}" if told else "all handed over")
            until = time.monotonic() + EVERY_S
            while not (once or stops()) and time.monotonic() < until:
                time.sleep(_STEP_S)
            if once:
                break
    return code


def _hand_over(link: JoinLink, key: SigningKey, unsent: set[Path]) -> str:
    """Send findings to the run's coordinator, for its page; return why some could not be sent."""
    from verify.coordinator_http import ContentRefused, CoordinatorHttp
    from verify.formats.findings import LIST_PATH

    http = CoordinatorHttp(link.coordinator, key, run=str(link.run), deadline_s=COORDINATOR_S)
    for path in sorted(unsent):
        try:
            http.call("POST", LIST_PATH, body=path.read_bytes())
        except ContentRefused as error:
            say(f"{path} lies here alone: {error}")
        except UserError as error:
            return str(error)
        unsent.remove(path)
    return ""
