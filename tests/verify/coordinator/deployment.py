"""A real coordinator for tests: keys, spec, an origin, the server in a thread or in a process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.files import write_atomic
from runspec.core.roles import OWN_WORKERS_FILE, make_invite, sign_latest, sign_roles
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.schema.role_names import island_names
from runspec.core.signed import SigningKey
from tests.verify.bench import envelope_of
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.coordinator.run import serve
from verify.formats.batch import BatchManifest, open_batch
from verify.formats.lease import Lease, lease_digest
from verify.formats.submission import Rollout, encode_rollouts
from verify.formats.verdict import CheckResult, RolloutVerdict, encode_verdicts, sign_verdict

RUN = "tiny"
GROUPS, GROUP_SIZE = 4, 2
DEADLINE_S = 600.0


def tiny_spec(*, lease_timeout: str = "60s", steps: int = 3, **changes: Any) -> RunSpec:
    """A spec of two pools; a change replaces a value, or fields of a block."""
    lengths = {"max_model_len": 64, "max_new_tokens": 32, "groups_per_submission": 2}
    pool = {"name": "near", "hardware": {"kind": "cpu"}, **lengths}
    algorithm = {"prompts_per_step": GROUPS, "group_size": GROUP_SIZE, "async_level": 1}
    sources = [{"name": "s", "kind": "parquet"}]
    values: dict[str, Any] = {
        "version": "runspec/v1",
        "name": RUN,
        "seed": 1,
        "steps": steps,
        "model": {"hf": "some/model", "max_context": 64},
        "data": {"max_prompt_tokens": 32, "sources": sources},
        "algorithm": algorithm,
        "optimizer": {"lr": 1e-3},
        "reward": [{"name": "r", "kind": "math"}],
        "learner": {"hardware": {"kind": "cpu"}, "packing": {"tokens": 64, "rows": 1}},
        "samplers": [pool, {**pool, "name": "far"}],
        "verify": {"lease_timeout": lease_timeout},
    }
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return RunSpec.model_validate(values)


class Site:
    """A run directory with keys, and an origin that is a plain file server."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.run, self.run_dir, self.store = spec.name, folder / "run", folder / "store"
        self.root, self.publisher, self.coordinator, self.validator = (
            SigningKey.generate() for _ in range(4)
        )
        self.islands = {name: SigningKey.generate() for name in island_names(spec)}
        self.coordinator.save(self.run_dir / "keys" / "coordinator.key")
        self.invite = make_invite(
            self.run, pool=None, uses=1000, valid_s=3600.0, coordinator=self.coordinator
        )
        self.sign_roles(self.validator)
        write_atomic(self.run_dir / "spec.json", dump_resolved(spec))
        self.store.mkdir()
        self.url = ""
        self.weights = ""

    def sign_roles(self, *validators: SigningKey) -> None:
        roles = {
            "publisher": [self.publisher.public_hex],
            "coordinator": [self.coordinator.public_hex],
            "validator": [validator.public_hex for validator in validators],
        }
        islands = {name: key.public_hex for name, key in self.islands.items()}
        document = sign_roles(self.run, roles, self.root, valid_s=3600.0, islands=islands)
        write_atomic(self.run_dir / "keys" / "roles.json", document)

    def new_coordinator(self) -> None:
        """Replaces the keys of coordinator and islands, as a rollback does."""
        self.coordinator = SigningKey.generate()
        self.islands = {name: SigningKey.generate() for name in self.islands}
        (self.run_dir / "keys" / "coordinator.key").unlink()
        self.coordinator.save(self.run_dir / "keys" / "coordinator.key")
        self.sign_roles()

    def own_worker(self, name: str, key: SigningKey) -> None:
        """Makes a key that of one of the run's own workers."""
        own = canonical_json({name: key.public_hex})
        write_atomic(self.run_dir / "keys" / OWN_WORKERS_FILE, own)

    def publish(self, version: int) -> None:
        data = sign_latest(self.run, version, digest_bytes(str(version).encode()), self.publisher)
        write_atomic(self.store / self.run / "latest.json", data)

    def client(
        self, key: SigningKey, *, run: str = "", root: str = "", deadline_s: float = DEADLINE_S
    ) -> CoordinatorClient:
        names = {"run": run or self.run, "root_public_key": root or self.root.public_hex}
        return CoordinatorClient(self.url, key, deadline_s=deadline_s, **names)

    def worker(
        self, pool: str = "near", *, invited: bool = True
    ) -> tuple[SigningKey, CoordinatorClient]:
        """A registered worker; one without an invite is a stranger, which no step relies on."""
        key = SigningKey.generate()
        client = self.client(key)
        client.register(pool, {"host": "test"}, invite=self.invite if invited else None)
        return key, client

    def batch(self, step: int) -> BatchManifest:
        path = self.run_dir / "rollouts" / f"step_{step}" / "batch.json"
        eventually(path.exists, f"batch of step {step}")
        keys = frozenset({self.coordinator.public_hex})
        return open_batch(path.read_bytes(), coordinators=keys, run=self.run, step=step)

    @contextmanager
    def origin(self) -> Iterator[None]:
        """Serves the store."""
        handler = functools.partial(_QuietHandler, directory=str(self.store))
        with _QuietServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            self.weights = f"http://127.0.0.1:{server.server_port}"
            try:
                yield
            finally:
                server.shutdown()
                thread.join()

    def server(self, started: Callable[[int], None]) -> Coroutine[Any, Any, None]:
        """On a free port, of which `started` is told."""
        root = self.root.public_hex
        where = {"host": "127.0.0.1", "port": 0, "weights": self.weights}
        return serve(self.run_dir, root_public_key=root, started=started, **where)  # type: ignore[arg-type]

    @contextmanager
    def serving(self) -> Iterator[asyncio.Future[None]]:
        """The server in a thread; yields its task (the result of a server that ended by itself)."""
        loop = asyncio.new_event_loop()
        port: asyncio.Future[int] = loop.create_future()
        task = loop.create_task(self.server(port.set_result))
        both = asyncio.wait({task, port}, return_when=asyncio.FIRST_COMPLETED)
        loop.run_until_complete(both)
        if task.done():
            loop.close()
            task.result()
        self.url = f"http://127.0.0.1:{port.result()}"
        # What ends the server is read from its task, not from the thread.
        thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait({task}),))
        thread.start()
        try:
            yield task
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(task.cancel)
            thread.join(DEADLINE_S)
            loop.close()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client has gone; the default writes a traceback into commands' captured output."""


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Tests need no access log."""


def blank_rows(
    lease: Lease, digest: str, *, size: int = GROUP_SIZE, note: int = 0
) -> list[Rollout]:
    """Rows of the right shape for a lease: whole groups, whose contents nobody sampled.

    Args:
        lease: the lease.
        digest: of the signed lease.
        size: rollouts of a group.
        note: what makes the rows differ from others.
    """
    prompt, output = (np.arange(length, dtype=np.int32) for length in (3, 5))
    return [
        Rollout(
            *(lease.run, lease.step, lease.worker, digest, f"p{note}", group, sample),
            *(lease.version, prompt, output, np.zeros(5, dtype=np.float32), "stop"),
            *(1.0, 1.0, -1, 8, 1.0, 0.0, [bytes(258)]),
        )
        for group in range(lease.groups)
        for sample in range(size)
    ]


def submission(data: bytes, lease: Lease, key: SigningKey, *, note: int = 0) -> tuple[bytes, bytes]:
    """Envelope and table that answer a signed lease."""
    table = encode_rollouts(blank_rows(lease, lease_digest(data), note=note))
    return envelope_of(table, data, lease, key), table


def verdict(
    digest: str,
    lease: Lease,
    key: SigningKey,
    *,
    task_rewards: Sequence[float] = (0.0, 1.0),
    accepted: bool = True,
    dropped: Sequence[int] = (),
    fault: str = "",
    fingerprints: Sequence[int] = (),
    gap_excess: float | None = None,
    reason: str | None = None,
) -> tuple[bytes, bytes]:
    """Envelope and table of a verdict; `task_rewards` are those of each group's samples, the
    fingerprints those of the first row, the excess of gaps that of each."""
    checks = [CheckResult("logprobs", accepted, 0.25, 0.5)]
    rows = [
        RolloutVerdict(
            *(digest, group * GROUP_SIZE + sample, group, task_rewards[sample], -0.5),
            *(task_rewards[sample] - 0.5, 5, 8, np.zeros(5, dtype=np.float32), 0.25, checks),
            fingerprints=list(fingerprints) if (group, sample) == (0, 0) else [],
            gap_excess=gap_excess,
        )
        for group in range(lease.groups)
        for sample in range(GROUP_SIZE)
    ]
    table = encode_verdicts(rows)
    if reason is None:
        reason = "" if accepted else "logprobs: row 0: 0.25 > 0.1"
    said = {"accepted": accepted, "reason": reason, "dropped_groups": list(dropped)}
    names = {"run": RUN, "step": lease.step, "submission": digest, "key": key}
    envelope = sign_verdict(table, fault=fault, **said, **names)  # type: ignore[arg-type]
    return envelope, table
