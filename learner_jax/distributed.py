"""Processes that join one program through `jax.distributed`, what they agree on, and their run.

Every process runs the same program on its share of the mesh. Two rules keep them together:

- What only one of them can know (the next batch, the newest checkpoint, that a file is damaged) is
  process 0's to find out, and the others are given it: `Peers.from_first`, `Peers.broadcast`.
- Where one may want to end and the others not, all say a word and do what the gravest one says:
  `Peers.agree`.

A process that dies is found out by JAX's coordination service, which lives in process 0: it ends
the others within its heartbeat deadline, with a message that gives the dead one's number.

`LearnerRun` is one run as each process of its learner sees it; an `IslandLink` says how an island
of it finds the others.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from learner_jax.metrics import Rows
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.files import Folder
from runspec.core.models import ModelConfig
from runspec.core.process import EXIT_USER_ERROR, RunStopped, leave, root_public_key
from runspec.core.run_files import corpus_cache, outer_folder, params_folder, state_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.role_names import island_names, island_spec

SHUTDOWN_S = 3600
"""How long a process that is done waits for the others: for process 0's last checkpoint."""
MAX_MESSAGE_BYTES = 2**31 - 1
_CHUNK_BYTES = 64 * 1024 * 1024
_SMALLEST_CHUNK_BYTES = 64 * 1024
_NAME_BYTES = 128
T = TypeVar("T")


class Word(IntEnum):
    """The next act that a process proposes; the largest of all counts."""

    GO = 0
    WAIT = 1
    """There is nothing to do yet: process 0 alone says it."""
    STOP = 2
    """It was told to end."""
    FAILED = 3
    """It cannot go on; the training state is whole, and can be saved."""
    UNSAVED = 4
    """It cannot go on, and saving is what failed."""


class PeerFailed(UserError):
    """Another process said that it cannot go on."""


@dataclass
class Peers:
    """The processes of this program."""

    index: int = 0
    """Number of this process."""
    names: list[str] = field(default_factory=lambda: [""])
    """Host and process id of each, by index."""
    agreed: Word = Word.GO
    """The word that all processes last agreed on."""
    reported: UserError | None = None
    """The error of this process that the others know of."""

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def first(self) -> bool:
        """Whether this is process 0: it alone reads batches and writes files by itself."""
        return self.index == 0

    def agree(self, word: Word, number: int = 0) -> tuple[Word, int]:
        """Collective: the gravest word of all, and process 0's number (0 .. 2^31 - 1).

        Raises:
            PeerFailed: another process failed; one that failed itself has its own error to raise.
        """
        said = np.array([[word, number]], np.int32)
        if self.count > 1:
            said = multihost_utils.process_allgather(said[0])
        self.agreed = Word(int(said[:, 0].max()))
        if self.agreed >= Word.FAILED and word < Word.FAILED:
            failed = int(np.flatnonzero(said[:, 0] == self.agreed)[0])
            raise PeerFailed(
                f"process {failed} of {self.count} ({self.names[failed]}) cannot go on",
                remedy="its log says why",
            )
        return self.agreed, int(said[0, 1])

    def tell(self, error: UserError, word: Word) -> None:
        """Collective: this process cannot go on; `error` is then raised here, a PeerFailed there.

        Args:
            error: why.
            word: FAILED or UNSAVED.
        """
        self.reported = error
        self.agree(word)

    def broadcast(self, data: bytes, size: int) -> bytes:
        """Collective: process 0's `data`, of `size` bytes, which all know; others pass b""."""
        if self.count == 1:
            return data
        chunks = []
        for start in range(0, size, _CHUNK_BYTES):
            wanted = min(size - start, _CHUNK_BYTES)
            # A few sizes, so that a few programs do it.
            length = max(_SMALLEST_CHUNK_BYTES, 1 << (wanted - 1).bit_length())
            buffer = np.zeros(length, np.uint8)
            if self.first:
                buffer[:wanted] = np.frombuffer(data, np.uint8, wanted, start)
            words = multihost_utils.broadcast_one_to_all(buffer.view(np.uint32))
            chunks.append(words.view(np.uint8)[:wanted].tobytes())
        return b"".join(chunks)

    def all_of(self, mine: bool) -> bool:
        """Collective: whether it is true in every process."""
        if self.count == 1:
            return mine
        return bool(multihost_utils.process_allgather(np.array([mine])).all())

    def each(self, action: Callable[[], None]) -> None:
        """Collective: runs `action` in every process.

        Raises:
            UserError: what it raised here; a PeerFailed where it raised in another.
        """
        self._or_tell(action)
        self.agree(Word.GO)

    def from_first(self, action: Callable[[], bytes]) -> bytes:
        """Collective: what `action` gives in process 0; elsewhere it is not run.

        Raises:
            UserError: what it raised there; a PeerFailed elsewhere.
        """
        data = self._or_tell(action) if self.first else b""
        _, size = self.agree(Word.GO, len(data))
        return self.broadcast(data, size)

    def json_from_first(self, action: Callable[[], Any]) -> Any:
        """Collective: `from_first` of a JSON value."""
        return json.loads(self.from_first(lambda: canonical_json(action())))

    def _or_tell(self, action: Callable[[], T]) -> T:
        """Runs `action`; the other processes are told of its UserError."""
        try:
            return action()
        except UserError as error:
            self.tell(error, Word.UNSAVED)
            raise


def mesh_devices(processes: int, needed: int) -> list[jax.Device]:
    """The devices for a mesh: all that are here, or an equal share of each of several processes.

    Raises:
        UserError: a process has fewer than its share.
    """
    if processes == 1:
        return jax.devices()
    share = needed // processes
    own = [[d for d in jax.devices() if d.process_index == index] for index in range(processes)]
    fewest = min(own, key=len)
    if len(fewest) < share or needed % processes:
        raise UserError(
            f"learner.mesh needs {needed} devices, {needed / processes:g} in each of {processes} "
            f"processes; one has {len(fewest)} ({jax.default_backend()})",
            place="learner.mesh",
            remedy="shrink the mesh, or on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={-(-needed // processes)}",
        )
    return [device for devices in own for device in devices[:share]]


@contextmanager
def joined(
    processes: int,
    coordinator: str | None,
    index: int | None,
    log: logging.Logger,
    *,
    join_s: int,
    heartbeat_s: int,
) -> Iterator[Peers]:
    """Joins the other processes for the block's time. Call before anything else touches JAX.

    Args:
        processes: `learner.hosts`.
        coordinator: HOST:PORT of process 0; None to take it from the environment, or where JAX
            finds out: a TPU pod, SLURM, Open MPI.
        index: of this process, 0 .. processes - 1; None likewise.
        log: told who is who.
        join_s: seconds to wait for the others; past them this process says so and ends.
        heartbeat_s: seconds of silence after which a process counts as dead.

    Raises:
        UserError: the address or the number is missing, they are not as many as the spec says, or
            a number is not JAX's.
    """
    if processes == 1:
        yield Peers()
        return
    coordinator, index = _place(processes, coordinator, index)
    _join(processes, coordinator, index, log, join_s, heartbeat_s)
    peers = Peers(jax.process_index(), _names(processes, index))
    who = ", ".join(f"{i}: {name}" for i, name in enumerate(peers.names))
    log.info("process %d of %d; %s", peers.index, peers.count, who)
    try:
        yield peers
    except RunStopped:
        # All have computed the same, and all stop.
        jax.distributed.shutdown()
        raise
    except UserError as error:
        # Of another error the others know nothing, and would not come to an orderly end.
        if error is peers.reported or isinstance(error, PeerFailed):
            jax.distributed.shutdown()
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Where each process has one device, JAX raises a failed collective as a ValueError.
        if isinstance(error, ValueError) and "Gloo" not in str(error):
            raise
        _await_verdict(error, peers, heartbeat_s, log)
        raise UserError(
            f"process {peers.index} of {peers.count} lost its peers: {str(error)[:400]}",
            remedy="see the logs of the other processes, then start all of them again",
        ) from error
    jax.distributed.shutdown()


def _place(
    processes: int, coordinator: str | None, index: int | None
) -> tuple[str | None, int | None]:
    """Coordinator and number as given, or of the environment where both variables are set; else
    JAX finds out.

    Raises:
        UserError: one is given alone, or the number is none of the learner's.
    """
    address, number = os.environ.get("JAX_COORDINATOR_ADDRESS"), os.environ.get("JAX_PROCESS_ID")
    if (coordinator, index) == (None, None) and address is not None and number is not None:
        if not number.isdecimal():
            raise UserError(f"{number!r} is not a number", place="JAX_PROCESS_ID")
        coordinator, index = address, int(number)
    if (coordinator is None) != (index is None):
        raise UserError(
            "--coordinator and --process are given together, or neither is",
            remedy="name the address of process 0 and the number of this one",
        )
    if index is not None and not 0 <= index < processes:
        raise UserError(
            f"process {index} of {processes}",
            place="--process",
            remedy=f"learner.hosts is {processes}: number the processes from 0",
        )
    return coordinator, index


def _join(
    processes: int,
    coordinator: str | None,
    index: int | None,
    log: logging.Logger,
    join_s: int,
    heartbeat_s: int,
) -> None:
    """Joins the others, or ends this process where that takes longer than `join_s`: JAX would abort
    it without saying for whom it waited."""
    given = index is not None
    me = f"process {index} of {processes}" if given else f"one of {processes} processes"

    def give_up() -> None:
        log.error(
            "learner.hosts: %s: not all had joined the coordinator at %s after %d s\n"
            "  remedy: start all of them, each with --coordinator HOST:PORT of process 0 and its "
            "--process number (on TPU pods and under SLURM without either); see that the port is "
            "open",
            *(me, coordinator or "the address that JAX found", join_s),
        )
        leave(EXIT_USER_ERROR)

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(join_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes if given else None,
            index,
            cluster_detection_method="deactivate" if given else None,
            initialization_timeout=join_s + heartbeat_s,  # ours comes first
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"this process cannot join the others: {str(error).splitlines()[0][:300]}",
            place="learner.hosts",
            remedy="start each process with --coordinator HOST:PORT of process 0 and its --process "
            "number; on TPU pods and under SLURM JAX finds out both",
        ) from error
    finally:
        timer.cancel()
    if jax.process_count() != processes:
        raise UserError(
            f"{jax.process_count()} processes joined, the spec says {processes}",
            place="learner.hosts",
            remedy="start as many as learner.hosts says",
        )


def _names(processes: int, index: int | None) -> list[str]:
    """Who the processes are, by JAX's numbers, which on TPUs are the slice's.

    Raises:
        UserError: in every process, where one was given another number than JAX's.
    """
    number = jax.process_index() if index is None else index
    name = f"{number} {socket.gethostname()}, process id {os.getpid()}".encode()[:_NAME_BYTES]
    mine = np.zeros(_NAME_BYTES, np.uint8)
    mine[: len(name)] = np.frombuffer(name, np.uint8)
    gathered = multihost_utils.process_allgather(mine).reshape(processes, _NAME_BYTES)
    texts = (row.tobytes().rstrip(b"\0").decode(errors="replace") for row in gathered)
    numbers, _, names = zip(*(text.partition(" ") for text in texts), strict=True)
    for own, (given, where) in enumerate(zip(numbers, names, strict=True)):
        if given != str(own):
            raise UserError(
                f"process {given} of the learner is {own} for JAX, on {where}",
                place="TPU_WORKER_ID",
                remedy="start each process on the host of its number in the slice, or set it there",
            )
    return list(names)


def _await_verdict(error: Exception, peers: Peers, heartbeat_s: int, log: logging.Logger) -> None:
    """Gives JAX's coordination service its time to say who died; it ends this process then."""
    log.error(
        "process %d of %d: %s; if another process died, its number follows within %d s",
        *(peers.index, peers.count, str(error).splitlines()[0][:300], heartbeat_s),
    )
    time.sleep(heartbeat_s + 5)


@dataclass(frozen=True)
class IslandLink:
    """One island of a run."""

    name: str
    """Its name in `learner.islands.members`."""
    coordinator: str = ""
    """URL of the coordinator. This and what follows is known to process 0 of the island alone."""
    key: Path = Path()
    """File of the key that signs its shares; roles.json names the public half."""
    share_url: str = ""
    """URL at which the other islands reach its server of shares."""
    share_store: Path = Path()
    """Folder that this server serves."""
    weights: tuple[str, ...] = ()
    """URLs of relays and origin, from which an island elsewhere gets version 0."""
    root_public_key: str | None = None
    """The pinned root key; None in the run directory, which has it."""


@dataclass(frozen=True)
class LearnerRun:
    """One run, as each process of its learner sees it."""

    folder: Path
    """The run directory."""
    spec: RunSpec
    """As resolved."""
    config: ModelConfig
    """The model's shape."""
    mesh: Mesh
    fingerprint: dict[str, Any]
    """Fingerprint of this program (`learner_jax.versions`)."""
    peers: Peers
    """The processes of the learner."""
    log: logging.Logger
    link: IslandLink | None = None
    """Which island of the run this program is; None for a run with one learner."""
    rows: Rows = field(default_factory=Rows)
    """Takes each row of metrics.jsonl, in process 0."""

    @property
    def island(self) -> str | None:
        """Name of this island."""
        return None if self.link is None else self.link.name

    @cached_property
    def own(self) -> RunSpec:
        """The spec by which this program trains: `spec`, or an island's part of it."""
        return self.spec if self.link is None else island_spec(self.spec, self.link.name)

    @property
    def trunk(self) -> bool:
        """Whether this program's folder is the run directory: it writes the versions."""
        return self.island is None or self.island == island_names(self.spec)[0]

    @property
    def params(self) -> Folder:
        """Folder of the parameters of versions, until they are published."""
        return params_folder(self.folder, self.spec, self._apart)

    @property
    def states(self) -> Folder:
        """Folder of this learner's full states."""
        return state_folder(self.folder, self.spec, self._apart)

    @property
    def corpus_cache(self) -> Path:
        """Cache of tokenized documents, which the run's islands on one machine share."""
        return corpus_cache(self.folder if self.trunk else outer_folder(self.folder))

    @property
    def _apart(self) -> str | None:
        """Name of an island that does not share the run's folders."""
        return None if self.trunk else self.island

    def root_public_key(self) -> str:
        """The public key that the run's roles are signed with."""
        given = None if self.link is None else self.link.root_public_key
        return given or root_public_key(self.folder, self.spec)
