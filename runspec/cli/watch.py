"""`runspec watch`: follows a run as a stranger, and trains some of its steps again."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from runspec.cli.machines import own_key, say, whole_link
from runspec.core.address import JoinLink, parse_join_link
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.signed import SigningKey
from runspec.local.backend import StopSignals

FOLDER = Path("watch")
EVERY_S = 20.0
"""Seconds between two looks for states that were published since."""
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
    once: Annotated[bool, typer.Option("--once", help="Ends after what is there now.")] = False,
) -> int:
    """Watches a run until Ctrl-C; returns the exit code: 1 where an interval is refuted."""
    whole = whole_link(parse_join_link(link), link, None, None)
    folder = (folder or FOLDER / str(whole.run)).absolute()
    with StopSignals() as stops:
        return _watch(whole, own_key(key), folder, share, stops, once=once)


def _watch(
    link: JoinLink, key: SigningKey, folder: Path, share: float, stops: StopSignals, *, once: bool
) -> int:
    from bridge.fetched_states import open_states, replay_published  # with the learner's packages
    from verify.formats.documents import LONGEST_LINE, Finding, sign_finding

    chance, seen, code = random.SystemRandom(), set[tuple[int, int]](), 0
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
                    say(f"{line}; {path}")
                    code = max(code, int(outcome == "refuted"))
            except UserError as error:  # a server may be away for a while, or a state gone
                if once:
                    raise
                say(str(error))
            until = time.monotonic() + EVERY_S
            while not (once or stops()) and time.monotonic() < until:
                time.sleep(_STEP_S)
            if once:
                break
    return code
