"""A process of a run: what it starts from, its log, its end on SIGTERM, its exit codes.

    python -m runspec.role NAME FOLDER

The folder is the run directory, or what another machine has for one. It holds spec.json,
endpoints.json and keys/. What a process needs besides the spec follows from these.

The messages between `runspec serve --follow` and vLLM's server are here too: one JSON object a
line, on a socket. The server is the child of the command, and the socket is one of an unnamed pair.
So both ends trust each other. The server sends a `Reply` once it can answer. From then on each
`Move` gets one.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from runspec.core.address import parse_address
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError, describe_error
from runspec.core.files import read_bounded, write_atomic
from runspec.core.schema import RunSpec, role_names
from runspec.core.schema.load import load_resolved
from runspec.core.schema.samplers import SamplerPool
from runspec.core.signed import SigningKey

SUPERVISOR = "RUNSPEC_SUPERVISOR"
"""Environment variable with the process id of the supervisor that starts a role."""
_PR_SET_PDEATHSIG = 1
EXIT_USER_ERROR = 1
EXIT_INTERNAL = 3
EXIT_FINAL = 4


class RunStopped(UserError):
    """Error: the run cannot go on, and restarting the role would not help, as in a stall."""


_OF_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextmanager
def not_retried() -> Iterator[None]:
    """Turn errors inside into RunStopped; also a decorator of functions.

    It is for errors that follow from the spec, its files and the installed packages: they recur in
    every attempt. Errors that may pass (a full disk, the network, too little memory) are raised
    unchanged, so that the role is restarted.
    """
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:
        if _may_pass(error) or _may_pass(error.__cause__):
            raise
        if isinstance(error, UserError):
            raise RunStopped(error.thing, place=error.place, remedy=error.remedy) from error
        logging.getLogger(__name__).exception("cannot go on")
        raise RunStopped(describe_error(error), remedy="mend the code that it names") from error


def _may_pass(error: BaseException | None) -> bool:
    return isinstance(error, OSError | MemoryError) and not isinstance(error, _OF_PATHS)


def setup_logging(role: str) -> logging.Logger:
    """Log one line an event to standard error: time, level, role, message."""
    logging.basicConfig(
        level=os.environ.get("RUNSPEC_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s %(levelname).1s {role} %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    return logging.getLogger(role)


def stop_event(grace_s: float | None = None) -> threading.Event:
    """Return an event that SIGTERM and SIGINT set, so that loops can end between two tasks.

    Args:
        grace_s: after so many seconds more the process is ended, with exit code 0.
    """
    event = threading.Event()

    def handle(number: int, frame: object) -> None:
        if grace_s is not None and not event.is_set():
            ending = threading.Timer(grace_s, os._exit, [0])
            ending.daemon = True
            ending.start()
        event.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return event


def stop_event_of_loop() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, for the running event loop.

    A server creates it before it reports its address, because it may be stopped from then on.
    Outside of the main thread no signal sets it: callers cancel instead.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, event.set)
    return event


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies for any reason."""
    supervisor = os.environ.get(SUPERVISOR)
    if sys.platform == "linux" and supervisor is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != supervisor:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process at once, with what it has logged and printed.

    An orderly end waits for threads whose disk does not answer, for peers that are gone, and
    seconds for vLLM. A role closes by itself what it has opened.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_role(role: str, body: Callable[[logging.Logger], None]) -> int:
    """Run a role's body and turn its errors into one message and an exit code.

    Returns:
        0 if the body ended by itself, 1 on a UserError, 3 on an internal error, 4 if the run must
        stop. The supervisor restarts the role unless the code is 0 or 4.
    """
    die_with_parent()
    log = setup_logging(role)
    try:
        body(log)
    except UserError as error:
        log.error("%s", error)
        return EXIT_FINAL if isinstance(error, RunStopped) else EXIT_USER_ERROR
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL
    return 0


ENDPOINTS_FILE = "endpoints.json"
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Endpoints:
    """Base URLs without a trailing slash."""

    coordinator: str = ""
    origin: str = ""
    relays: dict[str, str] = field(default_factory=dict)
    """URLs by the relay's name in the spec."""
    learner: str | None = None
    """Where the processes of `learner.hosts` above 1 find each other."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Relays that other machines start, by name: where they can be reached."""
    public: dict[str, str] = field(default_factory=dict)
    """Addresses of proxies before what listens here, by role name."""
    shares: dict[str, str] = field(default_factory=dict)
    """Where islands serve their shares, by the island's name."""
    islands: dict[str, str] = field(default_factory=dict)
    """Where the processes of an island with several find each other, by the name of the first."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Where roles that are no servers have their figures, by the process's name."""

    def all(self) -> dict[str, str]:
        """URL by role name, of what listens on this machine."""
        named = {f"relay-{name}": url for name, url in self.relays.items()}
        named |= {"learner": self.learner} if self.learner else {}
        named |= self.islands | {
            role_names.shares_name(name): url for name, url in self.shares.items()
        }
        return {"coordinator": self.coordinator, "origin": self.origin} | named

    def weights(self) -> list[str]:
        """Where workers elsewhere fetch versions: relays in the order of the spec, then origin."""
        here = {name: self.public.get(f"relay-{name}", url) for name, url in self.relays.items()}
        return [*(here | self.elsewhere).values(), self.public.get("origin", self.origin)]


def address(url: str) -> tuple[str, int]:
    """Host and port of an endpoint.

    Raises:
        UserError: the URL is no http://host:port.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or not host or not port:
        raise UserError(
            f"not an address to listen on: {url!r}",
            place=ENDPOINTS_FILE,
            remedy="the local backend's servers have URLs like http://127.0.0.1:8000",
        )
    return host, port


def load_endpoints(folder: Path) -> Endpoints | None:
    """Reads endpoints.json; None where there is none yet."""
    path = folder / ENDPOINTS_FILE
    if not path.exists():
        return None
    try:
        return Endpoints(**parse_object(read_bounded(path, _MAX_BYTES), max_bytes=_MAX_BYTES))
    except (MalformedJson, TypeError) as error:
        thing = f"not the endpoints of a run: {error}"
        raise UserError(thing, place=str(path), remedy="remove the file") from error


def save_endpoints(folder: Path, endpoints: Endpoints) -> None:
    write_atomic(folder / ENDPOINTS_FILE, canonical_json(asdict(endpoints)))


def root_public_key(folder: Path, spec: RunSpec) -> str:
    """Return the run's root key: the pinned one, or the throw-away one that it made.

    Args:
        folder: the run directory, or what another machine has for one.
        spec: of the run.

    Raises:
        UserError: that one cannot be read.
    """
    pinned = spec.identity.root_public_key
    return pinned or SigningKey.load(folder / "keys" / "root.key").public_hex


@dataclass(frozen=True)
class Role:
    """One process of a run, as it starts."""

    name: str
    """One of `role_names`, or of `STAGES`; a volunteer's worker is called like its pool."""
    folder: Path
    """The run directory, or what this machine has for one."""
    spec: RunSpec
    """The spec of the folder; the coordinator may have a newer one for workers and validators."""
    endpoints: Endpoints
    listen: str | None = None
    """HOST:PORT where a server listens that is reached at another address; None: at its own."""
    key_file: Path | None = None
    """The private key that it signs with; None: the one in the folder."""

    @classmethod
    def load(
        cls, name: str, folder: Path, *, listen: str | None = None, key_file: Path | None = None
    ) -> Role:
        """Return a role of the run that a folder is of; it need not have endpoints.json.

        Raises:
            UserError: a file cannot be read.
        """
        endpoints = load_endpoints(folder) or Endpoints()
        return cls(name, folder, load_resolved(folder), endpoints, listen, key_file)

    @property
    def kind(self) -> str:
        """What it does: a key of the table in `runspec.role`."""
        kinds = role_names.role_kinds(self.spec) | {stage: stage for stage in role_names.STAGES}
        return kinds.get(self.name) or ("worker" if self.name in self._pools else self.name)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where a server listens.

        Raises:
            UserError: none is known.
        """
        if self.listen is not None:
            return parse_address(self.listen)
        return address(self.endpoints.all().get(self.name, ""))

    @property
    def figures(self) -> str | None:
        """Where its figures are served, HOST:PORT (`serve_metrics`); None: nowhere."""
        url = self.endpoints.metrics.get(self.name)
        return None if url is None else urlsplit(url).netloc

    @property
    def work(self) -> Path:
        """Its own folder, for what it fetches; a volunteer's worker has the whole folder."""
        return self.folder if self.name in self._pools else self.folder / "work" / self.name

    @property
    def versions(self) -> Path:
        """Folder of fetched versions, which all processes of `folder` share."""
        return (self.folder if self.name in self._pools else self.folder / "work") / "weights"

    @property
    def store(self) -> Path:
        """The store that a server of weights or shares serves."""
        return self.folder / "store" / self.name

    @cached_property
    def root_public_key(self) -> str:
        """The root key that the run's roles are signed with."""
        return root_public_key(self.folder, self.spec)

    def key(self) -> SigningKey:
        """The key that it signs with.

        Raises:
            UserError: it cannot be read.
        """
        return SigningKey.load(self.key_file or self.folder / "keys" / f"{self.name}.key")

    @property
    def pool(self) -> str:
        """The name of a worker's pool."""
        return role_names.worker_names(self.spec).get(self.name, self.name)

    def program(self) -> tuple[str | None, list[str], str | None]:
        """Return what a learner's process is part of.

        Returns:
            The island, None in a run with one learner; the processes of the program; and the URL
            where they find each other, None for a single one or where JAX finds out.
        """
        known = role_names.programs(self.spec).items()
        island, names = next((island, names) for island, names in known if self.name in names)
        ends = self.endpoints
        return island, names, ends.learner if names[0] == "learner" else ends.islands.get(names[0])

    def upstreams(self) -> list[str]:
        """Return the URLs from which a relay fetches versions."""
        relays = {f"relay-{relay.name}": relay for relay in self.spec.broadcast.relays}
        return [self._relays.get(up, self.endpoints.origin) for up in relays[self.name].upstream]

    def weights(self) -> list[str]:
        """Return the URLs from which it fetches versions.

        The relays that a worker's pool names come in that order. Others have all, each process
        another one first. The origin comes last, for when none answers.
        """
        pool = self._pools.get(role_names.worker_names(self.spec).get(self.name, ""))
        named = None if pool is None else pool.relays
        if named is None:
            named = [*self._relays]
            turn = self._turn % len(named) if named else 0
            named = [*named[turn:], *named[:turn]]
        urls = [self._relays[name] for name in named if name in self._relays]
        return [url for url in (*urls, self.endpoints.origin) if url]

    @property
    def _pools(self) -> dict[str, SamplerPool]:
        return {pool.name: pool for pool in self.spec.samplers}

    @property
    def _relays(self) -> dict[str, str]:
        return self.endpoints.relays | self.endpoints.elsewhere

    @property
    def _turn(self) -> int:
        """Number of the process among those of its kind."""
        islands = [names[0] for names in role_names.island_processes(self.spec).values()]
        workers = [*role_names.worker_names(self.spec)]
        kinds = (role_names.validator_names(self.spec), workers, islands)
        return next((names.index(self.name) for names in kinds if self.name in names), 0)


FOLLOW_VARIABLE = "RUNSPEC_FOLLOW"
"""Environment variable with the server's `Settings`."""


@dataclass(frozen=True)
class Settings:
    """What the server is told at its start."""

    descriptor: int
    """Of its end of the socket."""
    name: str
    """Of the run."""
    version: int
    """The version that it loads at its start."""
    hold_s: float
    """Seconds that new requests wait at most until those under way have ended."""


@dataclass(frozen=True)
class Move:
    """Asks the server to load another version."""

    version: int
    folder: str
    """Hugging Face directory whose files were checked."""


@dataclass(frozen=True)
class Reply:
    """Says which version the server answers with now."""

    version: int
    running: int = 0
    """Requests that did not end within `hold_s`; if it is not 0, the server did not move."""
    error: str = ""
    """Why the engine holds no version; nothing is answered any more."""


def encode(message: Settings | Move | Reply) -> bytes:
    """Return a message as a line."""
    return json.dumps(asdict(message)).encode() + b"\n"
