"""Many keys of one attacker: `python -m tests.attacks.hostile_keys ATTACK=KEYS ...`.

Each key asks for work without a pause and answers as a strategy of the simulator says. What it
answers honestly is sampled with transformers, for vLLM takes long to start.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np

from runspec.core.errors import UserError
from runspec.core.run_files import STATE_FILE
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from runspec.simulate.population import Strategy, StrategyBlock
from sampler.engine.requests import Sampled, SampleRequest
from sampler.worker.rollouts import claim_rewards, make_rollouts, plan_rollouts
from sampler.worker.stores import Versions
from tests.attacks.strange import strange_info, strange_table
from tests.harness import ROOT
from tests.verify.bench import envelope_of
from tests.verify.coordinator.deployment import blank_rows
from tests.waiting import eventually
from verify.client import CoordinatorClient, RunFinished, SubmissionRefused
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay
from verify.coordinator.machine.trust import Standing
from verify.formats.lease import Lease, lease_digest, open_lease
from verify.formats.submission import Rollout, encode_rollouts
from verify.noise import gumbel
from verify.plugins import TaskSet, WeightsLocation, load_task_set
from verify.toploc import CHUNK_ROWS, build_proofs_of, round_to_bf16, select

ATTACKS = {
    "rubbish": StrategyBlock(kind="rubbish"),
    "strange": StrategyBlock(kind="rubbish"),
    "silent": StrategyBlock(kind="collude", record=1, misdeed="withhold"),
    "alternating": StrategyBlock(kind="alternate", honest=1, of=4, misdeed="withhold"),
}
RUBBISH_BYTES = 200
GROUP_SIZE = 8
"""Of the laptop profile, for answers that nobody sampled."""
POLL_S = 1.0
"""How long one question for a lease stays open."""
LOOK_S = 0.5
"""Between two looks at the verdicts."""
VERDICT_S = 5.0
"""How long a key that wants a record waits for a verdict before it works for another."""
ClientOf = Callable[[SigningKey], CoordinatorClient]
Sample = Callable[[bytes, Lease], list[Rollout]]
"""Makes the honest rollouts of a signed lease."""


class Member:
    """One hostile key of a run's pool.

    Args:
        client_of: makes the client of a key.
        strategy: decides how it answers a lease.
        pool: that it registers for.
        sample: makes what it answers honestly.
        strange: whether its rubbish has the right form, and what it says of itself is hostile too.
    """

    def __init__(
        self, client_of: ClientOf, strategy: Strategy, pool: str, sample: Sample, strange: bool
    ) -> None:
        self.key, self._strategy, self._accepted = SigningKey.generate(), strategy, 0
        self._answered = -VERDICT_S
        self._client, self._pool, self._sample = client_of(self.key), pool, sample
        self._strange = Random(self.key.public_hex) if strange else None

    def work(self) -> None:
        """Answers leases until the run is finished, or refuses the key."""
        try:
            info = strange_info(self._strange) if self._strange else {}
            self._client.register(self._pool, info)
            while True:
                if self._has_record():
                    time.sleep(LOOK_S)
                elif (signed := self._client.lease(POLL_S)) is not None:
                    self._answer(signed)
        except (RunFinished, UserError) as end:
            logging.info("key %s ends: %s", self.key.public_hex[:16], end)

    def judged(self, accepted: int) -> None:
        """Tells the strategy how many submissions were accepted so far."""
        for _ in range(accepted - self._accepted):
            self._strategy.judged(True)
        self._accepted = accepted

    def _has_record(self) -> bool:
        """Whether it waits for a verdict, or for others' records: more work would help the run."""
        strategy = self._strategy
        if strategy.ready():
            return False
        return strategy.missing <= 0 or time.monotonic() < self._answered + VERDICT_S

    def _answer(self, signed: bytes) -> None:
        lease = open_lease(signed, coordinators=self._client.roles().coordinator)
        match self._strategy.answer(lease, time.time()).what:
            case "rollouts":
                table = encode_rollouts(self._sample(signed, lease))
                self._answered = time.monotonic()
            case "rubbish" if self._strange:
                rows = blank_rows(lease, lease_digest(signed), size=GROUP_SIZE)
                table = strange_table(rows, self._strange)
            case "rubbish":
                table = os.urandom(RUBBISH_BYTES)
            case _:
                return
        with suppress(SubmissionRefused):
            self._client.submit(envelope_of(table, signed, lease, self.key), table)


def attack(
    keys: Mapping[str, int], client_of: ClientOf, *, url: str, pool: str, sample: Sample
) -> None:
    """Attacks a run until it is finished, or refuses all keys.

    Args:
        keys: how many of each attack.
        client_of, pool, sample: of each key.
        url: the coordinator's.
    """
    members = []
    for name, count in keys.items():
        alike: list[Strategy] = []
        for _ in range(count):
            strategy = Strategy(ATTACKS[name], alike)
            members.append(Member(client_of, strategy, pool, sample, name == "strange"))
    threads = [threading.Thread(target=member.work, daemon=True) for member in members]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(LOOK_S)
        with suppress(httpx.HTTPError):  # the coordinator may be away
            workers = httpx.get(f"{url}/v1/status").json()["workers"]
            accepted = {each["key"]: each["accepted_submissions"] for each in workers}
            for member in members:
                member.judged(accepted.get(member.key.public_hex, 0))


class Sampler:
    """Samples leases honestly with transformers; threads may share it.

    Args:
        spec: of the run.
        pool: whose leases.
        versions: where policy versions come from.
    """

    def __init__(self, spec: RunSpec, pool: SamplerPool, versions: Versions) -> None:
        self._spec, self._pool, self._versions = spec, pool, versions
        self._tasks: TaskSet | None = None
        self._one = threading.Lock()

    def __call__(self, signed: bytes, lease: Lease) -> list[Rollout]:
        with self._one:
            from transformers import AutoModelForCausalLM  # takes seconds, and not every attack it

            path = self._versions.get(lease.version, lease.manifest_digest)
            self._tasks = tasks = self._tasks or load_task_set(self._spec, path, None)
            model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
            size = self._spec.algorithm.group_size
            plan = plan_rollouts(lease, tasks, self._pool, group_size=size)
            requests = [planned.request for planned in plan]
            groups = [requests[at : at + size] for at in range(0, len(requests), size)]
            sampled = [row for group in groups for row in sample_group(model, group)]
            claims = claim_rewards(plan, sampled, tasks)
        proofs = build_proofs_of([each.selection for each in sampled])
        finished = zip(plan, sampled, claims, proofs, strict=True)
        return make_rollouts(lease, lease_digest(signed), finished, tasks, self._pool)


def sample_group(model: Any, requests: list[SampleRequest]) -> list[Sampled]:
    """Samples one prompt under the noise of each request."""
    import torch

    first, given, past = requests[0], torch.tensor([r.prompt_tokens for r in requests]), None
    keys = torch.tensor([r.noise_key for r in requests], dtype=torch.int32)
    steps = []
    with torch.inference_mode():
        for position in range(first.max_new_tokens):
            out = model(given, past_key_values=past, use_cache=True, output_hidden_states=True)
            past, scaled = out.past_key_values, out.logits[:, -1].float() / first.temperature
            at = torch.tensor(position, dtype=torch.int32)
            every = torch.arange(scaled.shape[-1], dtype=torch.int32)
            given = (scaled + gumbel(torch, keys[:, :1], keys[:, 1:], at, every)).argmax(-1, True)
            logprobs = scaled.log_softmax(-1).gather(-1, given)
            steps.append((given[:, 0], logprobs[:, 0], out.hidden_states[-1][:, -1]))
    tokens, logprobs, hidden = (torch.stack(each, 1).numpy() for each in zip(*steps, strict=True))
    return [_row(*each, first) for each in zip(tokens, logprobs, hidden, strict=True)]


def _row(
    tokens: np.ndarray, logprobs: np.ndarray, hidden: np.ndarray, request: SampleRequest
) -> Sampled:
    ends = np.flatnonzero(tokens == request.end_token)
    length = int(ends[0]) + 1 if len(ends) else len(tokens)
    bits = round_to_bf16(np.ascontiguousarray(hidden[:length]))
    chunks = [bits[at : at + CHUNK_ROWS].ravel() for at in range(0, length, CHUNK_ROWS)]
    return Sampled(
        tokens[:length].astype(np.int32),
        logprobs[:length],
        "stop" if len(ends) else "length",
        np.zeros(length, np.int32),
        select(chunks),
    )


def standings(run_dir: Path, own: str) -> tuple[Standing | None, list[Standing]]:
    """Of the run's own worker (None: not registered yet), and of all others, by the ledger."""
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        workers = replay(Policy.of(load_resolved(run_dir)), ledger.events()).workers
    found = {key: worker.standing for key, worker in workers.items()}
    return found.pop(own, None), list(found.values())


@contextmanager
def hostile(run_dir: Path, keys: Mapping[str, int]) -> Iterator[None]:
    """Runs the attacker's process beside a run that is being applied.

    Args:
        run_dir: of the run.
        keys: how many of each attack; without any it ends at once.
    """
    log, endpoints = run_dir.parent / "hostile.log", run_dir / "endpoints.json"
    roles = run_dir / "keys" / "roles.json"
    eventually(lambda: endpoints.exists() and roles.exists(), "an address")
    urls = json.loads(endpoints.read_text())
    words = [*(f"{name}={count}" for name, count in keys.items()), "--run", run_dir.name]
    words += ["--coordinator", urls["coordinator"], "--weights", urls["origin"]]
    root = json.loads(roles.read_text())["key"]
    words += ["--public-key", root, "--dir", str(log.parent / "its")]
    command = ["nice", sys.executable, "-m", "tests.attacks.hostile_keys", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("attacks", nargs="*", metavar="ATTACK=KEYS")
    for word in ("run", "coordinator", "weights", "public-key", "dir"):
        parser.add_argument(f"--{word}", required=True)
    options = parser.parse_args()
    pinned = {"run": options.run, "root_public_key": options.public_key}

    def client_of(key: SigningKey) -> CoordinatorClient:
        return CoordinatorClient(options.coordinator, key, **pinned)

    spec = client_of(SigningKey.generate()).spec()
    cache = Path(options.dir) / "weights"
    source = WeightsLocation(options.run, [options.weights], options.public_key, cache)
    versions = Versions(source, spec.verify.lease_timeout, logging.getLogger())
    keys = {name: int(count) for name, count in (each.split("=") for each in options.attacks)}
    sample = Sampler(spec, spec.samplers[0], versions)
    attack(keys, client_of, url=options.coordinator, pool=spec.samplers[0].name, sample=sample)


if __name__ == "__main__":
    main()
