"""`runspec serve`: serves a version, or finds what the run publishes and takes the server to it.

vLLM's server runs a middleware of ours (`sampler.engine.version_switch`), which holds requests and
loads weights in place. This process finds versions and checks their files.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from broadcast.layout import manifest_name, stored_versions
from broadcast.manifest import WeightsManifest
from runspec.cli import options
from runspec.cli.runs import run_and_version
from runspec.cli.serve import await_end, link_files, served, serving
from runspec.core.errors import BadUsage, UserError, one_line
from runspec.core.follow_protocol import VARIABLE, Move, Reply, Settings, encode
from runspec.core.run_files import PROBE_FILE, weights_folder
from runspec.core.schema import RunSpec
from runspec.local.backend import StopSignals
from runspec.local.formatting import reported
from runspec.local.model_folders import published_version

POLL_S = 1.0
"""Seconds between two looks for a new version."""
START_S = 3600.0
"""Seconds that vLLM may take to start and load the first version."""
MOVE_S = 660.0
"""Seconds for an answer to a move, beside those that requests are held: more than the server
gives the engine to load it."""
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
            link_files(found.folder, own)
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


def follow_newest(
    what: str, host: str, port: int, hold_s: float, more: Sequence[str], runs_dir: Path
) -> int:
    """Serve the newest version of a run until Ctrl-C or SIGTERM; return 0.

    Args:
        what: name of the run.
        host, port: where to listen.
        hold_s: longest time that new requests wait for those under way before a move.
        more: further options of vLLM's server.
        runs_dir: folder of runs.

    Raises:
        UserError: as `serve_command`, or the server can load a version no more.
    """
    found = served(what, runs_dir)
    if found.manifest is None or len(found.names) == 1:
        raise BadUsage(
            "only the newest version of a run can be followed",
            place=what,
            remedy="name the run, or leave out --follow",
        )
    run_dir, spec, _ = run_and_version(what, runs_dir)
    ours, servers = socket.socketpair()
    settings = Settings(servers.fileno(), spec.name, found.manifest.version, hold_s)
    with (
        tempfile.TemporaryDirectory(prefix="runspec-follow-", ignore_cleanup_errors=True) as own,
        closing(servers),
        serving(
            found,
            host,
            port,
            [*_IN_SERVER, *more],
            environment={VARIABLE: json.dumps(asdict(settings))},
            descriptors=[servers.fileno()],
        ) as server,
        StopSignals() as stops,
    ):
        servers.close()  # the server's copy is the only one: its end ends the follower
        follower = Follower(Versions(run_dir, spec, found.manifest, Path(own)), ours, hold_s)
        follower.start()
        first = f"{spec.name}, now version {found.manifest.version}"
        print(f"{first}, at http://{host}:{port}/v1", flush=True)
        try:
            return await_end(server, stops, lambda: follower.error)
        finally:
            follower.end()


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
    runs_dir: options.RunsDir = options.RUNS,
) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0. Further options are those of vLLM's server.

    Raises:
        UserError: vLLM is not installed, the files are not what was published, or the server ended
            by itself.
    """
    if follow:
        return follow_newest(what, host, port, hold, context.args, runs_dir)
    found = served(what, runs_dir)
    with serving(found, host, port, context.args) as server, StopSignals() as stops:
        print(f"{' and '.join(found.names)} at http://{host}:{port}/v1", flush=True)
        return await_end(server, stops)
