"""A swarm of HTTP clients at one coordinator on one core: how long submissions and leases take.

CLIENTS (2,000) wait for leases from 64 loopback addresses, take a lease's time to "sample", and
hand in rows of the right shape, RATE (20) a second in all, for MINUTES (30). A validator of the run
accepts what comes, and a version follows each step. The coordinator is the real one, with its
ledger synced at each event.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from runspec.core.canonical import canonical_json
from runspec.core.roles import make_invite, use_invite
from runspec.core.run_files import step_folder
from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec, verdict
from tests.verify.coordinator.test_storage import running
from verify.client import RunFinished
from verify.coordinator_http import ENVELOPE, sign_request
from verify.formats.batch import FILE_NAME
from verify.formats.lease import open_lease

CLIENTS = int(os.environ.get("CLIENTS", "2000"))
RATE = float(os.environ.get("RATE", "20"))
MINUTES = float(os.environ.get("MINUTES", "30"))
ADDRESSES = 64
GROUPS, LAG = 200, 4
"""Groups of a step, of which a lease has one, and steps that are open beside it."""
POLL_S = 30.0


class Swarm:
    """The clients, and what they measured, in seconds."""

    def __init__(self, site: Site, invite: str) -> None:
        self._site, self._invite = site, invite
        self.submitted: list[float] = []
        """Once all clients are registered."""
        self.count = 0
        self.registered = 0
        self.leases: dict[int, list[float]] = {}
        """When each lease of a step came."""
        self.answers = Counter[str]()
        # A step waits for its slowest, so a client comes to less than its own rate.
        self._sampling_s = min(CLIENTS, GROUPS * (LAG + 1)) / RATE / 1.85

    async def run(self) -> None:
        async with AsyncExitStack() as up:
            sessions = [
                await up.enter_async_context(
                    aiohttp.ClientSession(
                        self._site.url,
                        connector=aiohttp.TCPConnector(
                            limit=0, local_addr=(f"127.0.0.{2 + number}", 0)
                        ),
                        timeout=aiohttp.ClientTimeout(total=120.0),
                    )
                )
                for number in range(ADDRESSES)
            ]
            members = [self._member(sessions[n % ADDRESSES], n) for n in range(CLIENTS)]
            await asyncio.gather(*members)

    async def _member(self, session: aiohttp.ClientSession, number: int) -> None:
        key, chance = SigningKey.generate(), random.Random(number)
        await asyncio.sleep(number / 50)
        invite = use_invite(self._invite, key.public_hex)
        await self._post(
            session, key, "/v1/workers", {"pool": "near", "info": {}, "invite": invite}
        )
        self.registered += 1
        beating = asyncio.create_task(self._beat(session, key))
        held: set[str] = set()
        while True:
            body = {"wait": POLL_S, "holding": sorted(held)}
            status, data = await self._post(session, key, "/v1/leases", body)
            if status == 410:
                break
            if status != 200:
                continue
            lease = open_lease(data, coordinators=frozenset({self._site.coordinator.public_hex}))
            if self.registered == CLIENTS:
                self.leases.setdefault(lease.step, []).append(time.monotonic())
            await asyncio.sleep(self._sampling_s * chance.uniform(0.5, 1.5))
            envelope, table = submission(data, lease, key, note=number)
            began = time.monotonic()
            await self._send(session, key, "/v1/submissions", table, envelope)
            self.count += 1
            if self.registered == CLIENTS:
                self.submitted.append(time.monotonic() - began)
        beating.cancel()

    async def _beat(self, session: aiohttp.ClientSession, key: SigningKey) -> None:
        while True:
            body = {"state": {"version": 0}}
            _, data = await self._post(session, key, "/v1/heartbeat", body)
            await asyncio.sleep(json.loads(data)["every_s"])

    async def _post(
        self, session: aiohttp.ClientSession, key: SigningKey, path: str, body: dict[str, object]
    ) -> tuple[int, bytes]:
        return await self._send(session, key, path, canonical_json(body))

    async def _send(
        self,
        session: aiohttp.ClientSession,
        key: SigningKey,
        path: str,
        body: bytes,
        envelope: bytes | None = None,
    ) -> tuple[int, bytes]:
        while True:
            headers = sign_request(key, run=RUN, method="POST", path=path, body=body)
            if envelope is not None:
                headers[ENVELOPE] = base64.b64encode(envelope).decode()
            async with session.post(path, data=body, headers=headers) as answer:
                self.answers[f"{path} {answer.status}"] += 1
                if answer.status not in (429, 503):
                    return answer.status, await answer.read()
                wait_s = float(answer.headers.get("Retry-After", "1"))
            await asyncio.sleep(wait_s)


def _judge(site: Site) -> None:
    """Accepts each submission."""
    client = site.client(site.validator)
    while True:
        try:
            item = client.next_submission(POLL_S)
            if item is None:
                continue
            lease = open_lease(item.lease, coordinators=frozenset({site.coordinator.public_hex}))
            client.verdict(*verdict(item.submission, lease, site.validator))
        except RunFinished:
            return


def _publish(site: Site, steps: int) -> None:
    """Publishes a version after each step, as a learner of RATE groups a second does."""
    trained = 0.0
    for step in range(steps):
        path = step_folder(site.run_dir, step) / FILE_NAME
        while not path.exists():
            time.sleep(0.05)
        trained = max(time.monotonic(), trained + GROUPS / RATE)
        time.sleep(max(0.0, trained - time.monotonic()))
        site.publish(step + 1)


def _quantiles(seconds: list[float]) -> str:
    return ", ".join(f"{each:.0f}" for each in 1e3 * np.quantile(seconds, (0.5, 0.99)))


def run() -> dict[str, object]:
    """Figures in ms, and of the coordinator's process.

    Raises:
        AssertionError: a submission was refused.
    """
    steps = round(RATE * 60 * MINUTES / GROUPS)
    algorithm = {"prompts_per_step": GROUPS, "async_level": LAG}
    pools = tiny_spec().samplers
    samplers = [p.model_copy(update={"groups_per_submission": 1}).model_dump() for p in pools]
    spec = tiny_spec(steps=steps, lease_timeout="10m", algorithm=algorithm, samplers=samplers)
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        site = Site(Path(folder), spec)
        site.publish(0)
        invite = make_invite(
            RUN, pool="near", uses=CLIENTS, valid_s=86400.0, coordinator=site.coordinator
        )
        with site.origin(), running(site) as process:
            measured = psutil.Process(process.pid)
            measured.cpu_affinity([0])
            memory = [measured.memory_info().rss]
            for work in (lambda: _judge(site), lambda: _judge(site), lambda: _publish(site, steps)):
                threading.Thread(target=work, daemon=True).start()
            swarm, began = Swarm(site, invite), time.monotonic()

            ended = threading.Event()

            def tell() -> None:
                while not ended.wait(10.0):
                    memory.append(measured.memory_info().rss)
                    newest = np.array(swarm.submitted[-200:] or [0.0])
                    print(
                        f"{time.monotonic() - began:.0f} s: {swarm.registered} clients, "
                        f"{swarm.count} submissions, newest {1e3 * np.median(newest):.0f} "
                        f"ms, {memory[-1] >> 20} MiB, {sum(measured.cpu_times()[:2]):.0f} CPU s",
                        file=sys.stderr,
                        flush=True,
                    )

            threading.Thread(target=tell, daemon=True).start()
            asyncio.run(swarm.run())
            ended.set()
            seconds, cpu_s = time.monotonic() - began, sum(measured.cpu_times()[:2])
    refused = {k: n for k, n in swarm.answers.items() if k[:18] == "/v1/submissions 40"}
    assert not refused, refused
    assert swarm.count >= steps * GROUPS
    # The first of these steps may have begun before all were registered.
    later = sorted(swarm.leases)[1:]
    waits = [at - min(swarm.leases[step]) for step in later for at in swarm.leases[step]]
    return {
        "clients": CLIENTS,
        "submissions": swarm.count,
        "a second": round(swarm.count / seconds, 1),
        "submission p50, p99, ms": _quantiles(swarm.submitted),
        "lease after the first of its step, p50, p99, ms": _quantiles(waits),
        "coordinator, cores": round(cpu_s / seconds, 2),
        "memory, MiB": f"{memory[0] >> 20} to {memory[-1] >> 20}, most {max(memory) >> 20}",
    }
