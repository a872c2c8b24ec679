"""`runspec serve`: serves a version, or finds what the run publishes and takes the server to it.

vLLM's server runs a middleware of ours (`sampler.engine.version_switch`), which holds requests and
loads weights in place. This process finds versions and checks their files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broadcast.layout import manifest_name, stored_versions
from broadcast.manifest import WeightsManifest
from runspec import cli
from runspec.cli import serve
from runspec.cli.runs import run_and_version
from runspec.cli.serve import Served
from runspec.core.address import is_loopback
from runspec.core.connection_limits import Observer, answering
from runspec.core.errors import BadUsage, UserError, one_line, reported
from runspec.core.http_server import serving
from runspec.core.process import FOLLOW_VARIABLE, Move, Reply, Settings, encode
from runspec.core.run_files import PROBE_FILE, weights_folder
from runspec.core.schema import RunSpec
from runspec.local.backend import StopSignals
from runspec.local.identity import ACCOUNTS_FILE, Accounts
from runspec.local.model_folders import published_version

if TYPE_CHECKING:  # it draws numpy, which the base package has not
    from runspec.local.chat import Engine, Front

POLL_S = 1.0
"""Seconds between two looks for a new version."""
START_S = 3600.0
"""Seconds that vLLM may take to start and load the first version."""
MOVE_S = 660.0
"""Seconds for an answer to a move, beside those that requests are held: more than the server
gives the engine to load it."""
_log = logging.getLogger(__name__)
_IN_SERVER = (
    *("--middleware", "sampler.engine.version_switch.VersionSwitch"),
    *("--worker-extension-cls", "sampler.engine.worker_extension.SamplerExtension"),
)


Checked = tuple[WeightsManifest, Path]
"""Manifest of a version whose files were compared with it, and a Hugging Face directory of their
own, from which the publisher takes nothing away."""


class Versions:
    """Finds the version of a run that is to be served next.

    Args:
        run_dir: of the run.
        spec: its resolved spec.
        manifest: of the version that is served.
        folder: where the files of others are linked.
    """

    def __init__(
        self, run_dir: Path, spec: RunSpec, manifest: WeightsManifest, folder: Path
    ) -> None:
        self._run_dir, self._spec, self._folder = run_dir, spec, folder
        self.manifest = manifest
        """Of the version that is served."""
        self._refused: dict[int, object] = {}

    def next(self) -> Checked | None:
        """Return the newest sound version that is to replace the served one; None: it stays.

        A version that is refused is printed once, and tried again if its files change.
        """
        published = stored_versions(self._run_dir / "store" / "origin", self._spec.name)
        here = [v for v in published if (weights_folder(self._run_dir) / f"v{v}").is_dir()]
        served = self.manifest.version
        # If the newest is before the served one, the run was rolled back, and any may be served.
        rolled_back = bool(here) and here[-1] < served
        for version in (v for v in reversed(here) if v > served or rolled_back):
            files = self._files(version)
            if self._refused.get(version) == files:
                continue
            try:
                return self._check(version)
            except (UserError, OSError) as error:
                self._refused[version] = files
                why = one_line(str(error), 500)
                print(f"version {version} is refused, version {served} stays: {why}", flush=True)
        return None

    def _files(self, version: int) -> object:
        """Return what changes with the files that decide whether a version is refused."""
        stored = self._run_dir / "store" / "origin" / manifest_name(self._spec.name, version)
        folder = weights_folder(self._run_dir) / f"v{version}"
        paths = [stored, self._run_dir / "keys" / "roles.json", *sorted(folder.glob("*"))]
        stats = [path.stat() for path in paths if path.exists()]
        return [(found.st_ino, found.st_size, found.st_mtime_ns) for found in stats]

    def _check(self, version: int) -> Checked:
        """Link the files of a version and compare them with its manifest.

        Raises:
            UserError, OSError: they are not what was published, or cannot be read.
        """
        from bridge.model_files import require_published  # draws numpy

        found = published_version(self._run_dir, self._spec, version)
        if _beside_weights(found.manifest) != _beside_weights(self.manifest):
            raise UserError(
                "its config or tokenizer differs from that of the served version",
                place=str(found.folder),
                remedy="start `runspec serve` again",
            )
        own = self._folder / f"v{version}"
        shutil.rmtree(own, ignore_errors=True)
        try:
            serve.link_files(found.folder, own)
            require_published(own, found.manifest)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        return found.manifest, own


def _beside_weights(manifest: WeightsManifest) -> dict[str, str]:
    """Return the digests of the files that have to be equal: config and tokenizer."""
    apart = {*manifest.files, PROBE_FILE}
    return {n: info.blake3 for n, info in manifest.objects.items() if n not in apart}


class Follower(threading.Thread):
    """Takes the server to new versions until it closes the socket.

    Checking the files of a large model takes minutes, in which Ctrl-C has to work: so it is a
    thread, which nobody waits for.

    Args:
        versions: finds them.
        channel: this end of the socket.
        hold_s: seconds that requests are held.
    """

    def __init__(self, versions: Versions, channel: socket.socket, hold_s: float) -> None:
        super().__init__(name="follow", daemon=True)
        self._versions, self._channel, self._hold_s = versions, channel, hold_s
        self._lines = channel.makefile("rb")
        self._ended = threading.Event()
        self.error: Exception | None = None
        """Why it ended, unless the server did."""

    def run(self) -> None:
        """Follow; an error is kept for the thread that waits for the server."""
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            if not self._ended.is_set():
                self.error = error

    def end(self) -> None:
        """Begin nothing any more, and close the socket, which ends the server."""
        self._ended.set()
        with suppress(OSError):  # the server has ended
            self._channel.shutdown(socket.SHUT_RDWR)

    def _follow(self) -> None:
        reply = self._reply(START_S)
        while reply is not None and not self._ended.wait(POLL_S):
            found = self._versions.next()
            if found is None:
                continue
            manifest, new = found
            name = f"version {manifest.version}"
            self._channel.sendall(encode(Move(manifest.version, str(new))))
            reply = self._reply(self._hold_s + MOVE_S)
            if reply is None:
                return
            if reply.running:
                shutil.rmtree(new, ignore_errors=True)
                held = f"{reply.running} requests did not end within {self._hold_s:g} s"
                print(f"{name} waits: {held}; tried again in as many", flush=True)
                self._ended.wait(self._hold_s)
                continue
            for folder in new.parent.iterdir():
                if folder != new:
                    shutil.rmtree(folder, ignore_errors=True)
            self._versions.manifest = manifest
            print(f"{name} is served", flush=True)

    def _reply(self, deadline_s: float) -> Reply | None:
        """Return the server's next message; None once it has ended.

        Raises:
            UserError: it holds no version, or does not answer in time.
        """
        self._channel.settimeout(deadline_s)
        late = f"no answer within {deadline_s:g} s"
        with reported(late, "vLLM", "see what it printed", TimeoutError):
            line = self._lines.readline()
        if not line:
            return None
        reply = Reply(**json.loads(line))
        if reply.error:
            raise UserError(
                f"a version cannot be loaded: {reply.error}",
                place="vLLM",
                remedy="see what it printed, and start `runspec serve` again",
            )
        return reply


@dataclass(frozen=True)
class _Vllm:
    """A server of vLLM that was started."""

    names: tuple[str, ...]
    engine: Engine
    process: subprocess.Popen[bytes]
    log: Path
    follower: Follower | None = None

    def check(self) -> None:
        """Raise the error that ended the server, or what follows the run."""
        if self.follower is not None and self.follower.error is not None:
            raise self.follower.error
        if (code := self.process.poll()) is not None:
            raise serve.server_failed(f"ended with exit code {code}", self.log)


@contextmanager
def _loading(
    found: Served, folder: Path, words: Sequence[str], shared: bool, **how: Any
) -> Iterator[_Vllm]:
    """Start vLLM at a socket that only this user reaches.

    Args:
        found: what it serves.
        folder: of the socket and the log; it is made.
        words: options of vLLM.
        shared: whether another one has a part of the memory.
        how: options of `serving`.
    """
    from runspec.local.chat import Engine

    folder.mkdir()
    at, log = folder / "vllm", folder / "log"
    more = ["--uds", str(at), "--uvicorn-log-level", "warning", *words]
    if shared and found.pool.hardware.kind != "cpu":  # vLLM's default is nearly all of it
        more = ["--gpu-memory-utilization", "0.45", *more]
    engine = Engine.of(found.names, found.folder, at, found.spec)
    with serve.serving(found, serve.HOST, 0, more, log, **how) as process:
        yield _Vllm(found.names, engine, process, log)


@contextmanager
def _following(
    run_dir: Path, hold_s: float, found: Served, folder: Path, words: Sequence[str], shared: bool
) -> Iterator[_Vllm]:
    """Start vLLM as `_loading` does, and take it to each new version of the run."""
    assert found.spec is not None and found.manifest is not None
    spec, own = found.spec, folder.with_name("versions")
    own.mkdir()
    ours, theirs = socket.socketpair()
    settings = Settings(theirs.fileno(), spec.name, found.manifest.version, hold_s)
    variables = {FOLLOW_VARIABLE: json.dumps(asdict(settings))}
    how = {"environment": variables, "descriptors": [theirs.fileno()]}
    with (
        closing(theirs),
        _loading(found, folder, [*_IN_SERVER, *words], shared, **how) as vllm,
    ):
        theirs.close()  # the server's copy is the only one: its end ends the follower
        follower = Follower(Versions(run_dir, spec, found.manifest, own), ours, hold_s)
        follower.start()
        try:
            engine = replace(vllm.engine, names=(spec.name,))  # the version changes
            yield replace(vllm, engine=engine, follower=follower)
        finally:
            follower.end()


async def _answer(
    front: Front, at: tuple[str, int], secret: str, vllms: Sequence[_Vllm], stops: Callable[[], int]
) -> int:
    """Answer at an address until somebody stops it; return 0.

    Args:
        front: answers.
        at: host and port.
        secret: what the link to the page ends with.
        vllms: servers, which may still load.
        stops: ends it.

    Raises:
        UserError: the port is taken, or a server ended or is not up in time.
    """
    from runspec.local.chat import LIMITS, is_up

    application = front.application()
    application.middlewares.insert(0, answering)
    async with serving(application, at, LIMITS, Observer(), _log) as (port, _):
        begun = told = time.monotonic()
        waits = list(vllms)
        while not stops():
            for each in vllms:
                each.check()
            now = time.monotonic()
            if waits and await is_up(waits[0].engine):
                waits.pop(0)
                if not waits:
                    _tell(front, at[0], port, secret, vllms)
            elif waits and now - begun > START_S:
                raise serve.server_failed(f"is not up in {START_S:g} s", waits[0].log)
            elif waits and now - told >= serve.TELL_S:
                told = now
                what = f"vLLM loads {waits[0].names[-1]}: {now - begun:.0f} s so far"
                print(f"{what}; it writes to {waits[0].log}", flush=True)
            await asyncio.sleep(serve.LOOK_S)
    return 0


def _tell(front: Front, host: str, port: int, secret: str, vllms: Sequence[_Vllm]) -> None:
    front.ready = True
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    for each in vllms:
        names = " and ".join(each.names)
        if each.follower is not None:
            names = f"{each.names[0]}, now version {each.names[1].rpartition('v')[2]},"
        print(f"ready: {names} at {url}/v1", flush=True)
    if secret:
        print(f"key: {secret} (Authorization: Bearer KEY)", flush=True)
    if front.page:
        print(f"page: {url}/" + (f"#token={secret}" if secret else ""), flush=True)


def _manage(accounts: Accounts, revoke: str | None) -> int:
    """Revoke an account, or print all; return the exit code.

    Raises:
        BadUsage: there is no such account.
    """
    if revoke is None:
        for name, revoked, tokens in accounts.all():
            print(f"{name:32}  {'revoked' if revoked else 'active':7}  {tokens:,} tokens today")
    elif not accounts.revoke(revoke):
        raise BadUsage(f"no account {revoke!r}", remedy="`--accounts` lists them")
    return 0


def serve_command(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, or a Hugging Face directory.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen at.")] = 8000,
    follow: Annotated[
        bool, typer.Option("--follow", help="Moves to each new version of the run.")
    ] = False,
    hold: Annotated[
        float,
        typer.Option("--hold", min=0.1, help="Seconds that requests wait at most before a move."),
    ] = 60.0,
    page: Annotated[bool, typer.Option("--page", help="A page to talk to the model, too.")] = False,
    beside: Annotated[
        str | None, typer.Option("--beside", help="Another version, which answers too.")
    ] = None,
    register: Annotated[
        bool, typer.Option("--register", help="People register; each has a key and a limit.")
    ] = False,
    day_tokens: Annotated[
        int, typer.Option("--day-tokens", min=1, help="Tokens of an account a day.")
    ] = 100_000,
    accounts: Annotated[bool, typer.Option("--accounts", help="Lists the accounts.")] = False,
    revoke: Annotated[
        str | None, typer.Option("--revoke", help="Ends an account and its keys.")
    ] = None,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0. Further options are those of vLLM's server.

    Raises:
        UserError: vLLM is not installed, the files are not what was published, the server ended
            by itself, or it can load a version no more.
    """
    from runspec.local.chat import Front

    if accounts or revoke is not None:
        return _manage(Accounts(run_and_version(what, runs_dir)[0] / ACCOUNTS_FILE), revoke)
    name = what.partition("@")[0]
    others = [] if beside is None else [f"{name}@{beside}" if beside.isdecimal() else beside]
    found = [serve.served(each, runs_dir) for each in (what, *others)]
    found = [replace(each, spec=each.spec or found[0].spec) for each in found]  # same questions
    if follow and len(found[0].names) == 1:
        raise BadUsage(
            "only the newest version of a run can be followed",
            place=what,
            remedy="name the run, or leave out --follow",
        )
    run_dir = None if found[0].spec is None else run_and_version(what, runs_dir)[0]
    if register and run_dir is None:
        raise BadUsage("only a run has accounts", place=what, remedy="leave out --register")
    known = Accounts(run_dir / ACCOUNTS_FILE) if register and run_dir is not None else None
    secret = "" if register or is_loopback(host) else secrets.token_urlsafe(16)
    with ExitStack() as up:
        folder, vllms = Path(up.enter_context(serve.socket_folder())), list[_Vllm]()
        for number, each in enumerate(found):
            how = (each, folder / str(number), context.args, len(found) > 1)
            started = _loading(*how)
            if follow and number == 0 and run_dir is not None:
                started = _following(run_dir, hold, *how)
            vllms.append(up.enter_context(started))
        engines = [each.engine for each in vllms]
        front = Front(engines, token=secret, accounts=known, day_tokens=day_tokens, page=page)
        stops = up.enter_context(StopSignals())
        return asyncio.run(_answer(front, (host, port), secret, vllms, stops))
