"""`runspec join`: works for a run as a volunteer, from its link on."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from runspec.core.address import JoinLink, parse_join_link, reachable
from runspec.core.canonical import parse_object
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError, one_line
from runspec.core.http_client import NoAnswer, fetch_now
from runspec.core.models.family import model_config
from runspec.core.process import Endpoints
from runspec.core.signed import SigningKey
from runspec.local.backend import StopSignals
from runspec.local.formatting import per_second, reported
from runspec.local.machine import look, module_is_installed, this_machine
from runspec.local.preflight import ROLE_MODULES
from runspec.local.run_dir import hold
from runspec.local.volunteer import LEAVE_S, Worker, choose_pool, lacks, open_pools

PROGRESS_S = 5.0
"""Seconds between two requests for the coordinator's status."""
_LOOK_S = 0.2
_STATUS_TIMEOUT_S = 5.0
"""Ctrl-C waits for the answer."""
_MAX_STATUS_BYTES = 8 * 1024 * 1024
_MAX_REASON = 1000
_NO_ANSWER = (NoAnswer, ValueError, LookupError, TypeError, AttributeError)
"""What asking a coordinator raises that answers nothing, or something else."""
FOLDER = Path("join")


@dataclass(frozen=True)
class JoinOptions:
    """The command line."""

    link: str
    key: Path
    public_key: str | None = None
    run: str | None = None
    pool: str | None = None
    folder: Path | None = None
    check: bool = False


def join_command(options: JoinOptions) -> int:
    """Joins a run and works for it; returns the exit code: 0 when it is finished, or left."""
    try:
        return _join(options)
    except KeyboardInterrupt:  # while still preparing: nothing is held
        say("left before any work was taken")
        return 0


def _join(options: JoinOptions) -> int:
    link = _whole(options, parse_join_link(options.link))
    modules = (*ROLE_MODULES["verify"], *ROLE_MODULES["sampler"])
    if absent := [name for name in modules if not module_is_installed(name)]:
        raise UserError(
            f"Python packages not installed here: {', '.join(absent)}",
            place="join",
            remedy=f"{install_command('sampler-cuda')} (or sampler-cpu, sampler-tpu)",
        )
    from verify.client import CoordinatorClient  # it needs them
    from verify.timeouts import PERSON_S

    assert link.run is not None and link.root is not None, "the link is whole"
    folder, key = (options.folder or FOLDER / link.run).absolute(), _key(options.key)
    client = CoordinatorClient(
        link.coordinator, key, run=link.run, root_public_key=link.root, deadline_s=PERSON_S
    )
    spec, site = client.spec(), client.site()
    say(f"run {spec.name}: {spec.steps} steps, pools {', '.join(p.name for p in spec.samplers)}")
    config = model_config(spec)
    if config is None:
        say(f"the size of {spec.model.hf} is not known here: memory and disk are not checked")
    to_fetch = sum(file.bytes for file in site.files)
    named = options.pool is not None or link.invite is not None
    pools = spec.samplers if named else open_pools(spec)
    facts = look()
    found = {each.name: lacks(each, spec, config, facts, folder, to_fetch) for each in pools}
    pool = choose_pool(found, options.pool)
    if options.check:
        say(f"this machine can serve pool {pool}")
        return 0
    if link.invite is not None:  # the worker that is started needs none after this
        client.register(pool, {}, invite=link.invite)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder), StopSignals() as stops:
        say(f"working in pool {pool}; Ctrl-C leaves. Log: {folder}")
        relays = {str(i): reachable(url, link) for i, url in enumerate(site.weights)}
        identity = spec.identity.model_copy(update={"root_public_key": link.root})
        worker = Worker(
            spec=spec.model_copy(update={"identity": identity}),
            endpoints=Endpoints(link.coordinator, relays=relays),
            key=options.key.absolute(),
            folder=folder,
            pool=next(each for each in spec.samplers if each.name == pool),
            cores=this_machine().cores,
            tell=say,
        )
        try:
            return _work(worker, Progress(link, key.public_hex), stops)
        finally:
            if worker.exit_code is None:
                worker.kill()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _work(worker: Worker, progress: Progress, stops: StopSignals) -> int:
    """Waits for the worker's end, or until the volunteer has enough; returns the exit code."""
    while not worker.wait(_LOOK_S):
        progress.look()
        if asked := stops():
            say("leaving: handing in what is done, giving the rest back")
            worker.leave()
            ends = time.monotonic() + LEAVE_S
            while not worker.wait(_LOOK_S):
                if time.monotonic() > ends or stops() > asked:
                    worker.kill()
                    say("the worker was killed, as it did not end in time; its leases expire")
                    return 0
            say("left; thank you")
            return 0
    progress.look(now=True)
    if worker.exit_code == 0:
        say("the run is finished; thank you")
        return 0
    if not worker.last_error:
        say(f"the worker ended with exit code {worker.exit_code}; its log says why")
    return 1


class Progress:
    """Prints what became of our work, each time that it changed.

    Args:
        link: of the run.
        key: ours.
    """

    def __init__(self, link: JoinLink, key: str) -> None:
        self._url, self._key = link.coordinator, key
        self._next, self._last, self._away = 0.0, "", False

    def look(self, *, now: bool = False) -> None:
        """Asks the coordinator, at most every few seconds, and prints a line where it is news."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_S
        try:
            line = progress_line(
                _answer(f"{self._url}/v1/status"), _answer(f"{self._url}/v1/workers/{self._key}")
            )
        except _NO_ANSWER as error:
            if not self._away and not now:  # a run that is finished may be gone already
                say(f"the coordinator does not answer ({type(error).__name__}); work goes on")
            self._away = True
            return
        self._away = False
        if line and line != self._last:
            say(line)
            self._last = line


def progress_line(status: dict[str, Any], mine: dict[str, Any]) -> str:
    """Version, speed and credit of one worker; empty before the coordinator knows it.

    Args:
        status: answer of `GET /v1/status`.
        mine: answer of `GET /v1/workers/KEY`; empty if the coordinator does not know the key.
    """
    if not mine:
        return ""
    version = mine["state"].get("version", -1)
    loaded = f"version {version}" if isinstance(version, int) and version >= 0 else "no version yet"
    parts = [
        f"step {status['steps_closed']} of {status['steps']}",
        loaded,
        f"{mine.get('open_leases', 0)} leases open",
        f"{per_second(mine.get('tokens_per_s'))} tokens/s",
        f"{mine['accepted_rollouts']} rollouts accepted",
        f"{mine['rejected_submissions']} submissions rejected",
        f"credit {mine['accepted_tokens']:,} tokens",
    ]
    if mine.get("reason"):
        parts.append(f"{mine['standing']}: {one_line(str(mine['reason']), _MAX_REASON)}")
    return ", ".join(parts)


def _answer(url: str) -> dict[str, Any]:
    """Return an answer of the coordinator's; empty if it has none of what is asked for."""
    answer = fetch_now("GET", url, max_bytes=_MAX_STATUS_BYTES, timeout_s=_STATUS_TIMEOUT_S)
    if answer.status == HTTPStatus.NOT_FOUND:
        return {}
    if not answer.is_success:
        raise ValueError(f"status {answer.status}")
    return parse_object(answer.content, max_bytes=_MAX_STATUS_BYTES)


def _whole(options: JoinOptions, link: JoinLink) -> JoinLink:
    """The link with what the options say; the run's name is asked of the coordinator if need be."""
    root = link.root or options.public_key
    if root is None:
        raise UserError(
            "nothing says whose signatures count",
            place=options.link[:200],
            remedy="take the whole link, with #run=NAME&root=HEX, or give --public-key HEX",
        )
    run = link.run or options.run
    if run is None:
        thing, remedy = "cannot ask the coordinator", "check the address, or give --run NAME"
        with reported(f"{thing} for its run", link.coordinator, remedy, *_NO_ANSWER):
            run = str(_answer(f"{link.coordinator}/v1/status")["run"])
    return replace(link, run=run, root=root)


def _key(path: Path) -> SigningKey:
    """The volunteer's key; made on first use, readable by its owner alone."""
    if not path.exists():
        with suppress(FileExistsError):  # another join was quicker
            SigningKey.generate().save(path)
            say(f"made a key: {path}. Credit is counted under it: keep it, show it to nobody")
    return SigningKey.load(path)
