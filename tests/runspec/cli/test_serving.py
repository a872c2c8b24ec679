"""Real servers: `runspec serve` gives vLLM's own tokens, and `--follow` loses no request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from runspec.core.run_files import weights_folder
from tests.harness import ROOT
from tests.preloaded import Program
from tests.runspec.cli.published import RUN, first_versions, publish_again, publish_run
from tests.sampler.worker.works import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 240.0
FIRST, LAST, TAMPERED = 1, 11, 12
"""Versions: served first, served last, and never served."""
TOKENS = 16
PROMPTS = [[5 + i, 60 + i, 7, 100 + i] for i in range(5)]
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
OFFLINE = """
import runpy
runpy.run_module("tests.runspec.cli.offline", run_name="__main__", alter_sys=True)
"""
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}


@dataclass
class Server:
    """A started `runspec serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def models(self) -> list[str]:
        found = httpx.get(f"{self.url}/v1/models", timeout=60.0).json()["data"]
        return [model["id"] for model in found]

    def complete(self, model: str, prompt: Sequence[int], **parameters: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "return_token_ids": True, **parameters}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60.0)


@contextmanager
def started(runs_dir: Path, folder: Path, *options: str) -> Iterator[Server]:
    """`runspec serve small`, once it answers."""
    port, log = free_port(), folder / "serve.log"
    command = [sys.executable, "-m", "runspec", "serve", RUN, "--port", str(port), *options]
    command += ["--runs-dir", str(runs_dir)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    server = Server(f"http://127.0.0.1:{port}", process, log)

    def answers() -> bool:
        try:
            return httpx.get(f"{server.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        eventually(
            answers,
            "the server answers",
            deadline_s=DEADLINE_S,
            hopeless=lambda: "" if process.poll() is None else "it ended",
            context=log.read_text,
            poll_s=0.2,
        )
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose versions are all published; on CPUs a load may leave a tied head stale."""
    return publish_run(tmp_path_factory.mktemp("published"), TAMPERED + 1, tied=True)


def greedy(folder: Path) -> list[list[int]]:
    """transformers' answers to the prompts, on the files of a version."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = torch.tensor(PROMPTS)
    tokens = prompts
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[:, prompts.shape[1] :].tolist()


@pytest.mark.usefixtures("preload_server")
def test_a_server_answers_what_vllm_answers_without_one(run_dir: Path, tmp_path: Path) -> None:
    # given a run with versions 0 and 1, and vLLM's own answers on the files of version 1
    first_versions(run_dir, tmp_path, FIRST + 1)
    folder = weights_folder(run_dir) / f"v{FIRST}"
    engine = {"model": str(folder), "dtype": "float32", "max_model_len": 112, "block_size": 32}
    engine |= {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
    engine |= {"skip_tokenizer_init": True}
    sampling = [{**each, "detokenize": False} for each in (GREEDY, SEEDED)]
    request, answers = tmp_path / "request.json", tmp_path / "answers.json"
    request.write_text(json.dumps({"engine": engine, "prompts": PROMPTS, "sampling": sampling}))
    log = tmp_path / "offline.log"
    assert Program(OFFLINE, request, answers, log=log).wait(DEADLINE_S) == 0, log.read_text()
    expected = json.loads(answers.read_text())
    assert expected[0] == greedy(folder) != expected[1]
    # when it is served
    with started(tmp_path, tmp_path) as server:
        # then the newest version has both names, under which it gives the same tokens
        assert server.models() == [RUN, f"{RUN}@v{FIRST}"]
        for name in server.models():
            found = [
                [server.complete(name, p, **how).json()["choices"][0]["token_ids"] for p in PROMPTS]
                for how in (GREEDY, SEEDED)
            ]
            assert found == expected
        # and a version that is not served has no name here
        assert server.complete(f"{RUN}@v0", PROMPTS[0]).status_code == 404
    assert server.process.returncode == 0


@dataclass
class Client:
    """Asks one question after the other, in a thread."""

    url: str
    streams: bool
    number: int
    stop: threading.Event
    answers: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """Name of the model that answered, number of the prompt, output tokens."""
    lost: list[str] = field(default_factory=list)

    @property
    def newest(self) -> str:
        """Name of the model that answered last."""
        return self.answers[-1][0] if self.answers else ""

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60.0) as http:
            while not self.stop.wait(0.2):
                which = (len(self.answers) + self.number) % len(PROMPTS)
                body = {"model": RUN, "prompt": PROMPTS[which], "stream": self.streams, **GREEDY}
                try:
                    self._ask(http, which, body | {"return_token_ids": True})
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.lost.append(repr(error))

    def _ask(self, http: httpx.Client, which: int, body: dict[str, Any]) -> None:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            if self.streams:
                lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
                if lines.pop() != "[DONE]":
                    raise ValueError("the stream broke off")
                events = [json.loads(line) for line in lines]
            else:
                events = [json.loads(answer.read())]
        [model] = {event["model"] for event in events}  # of one version
        choices = [choice for event in events for choice in event["choices"]]
        tokens = [token for choice in choices for token in choice["token_ids"] or []]
        self.answers.append((model, which, tokens))


def test_under_load_a_server_follows_ten_versions_and_loses_nothing(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = first_versions(run_dir, tmp_path, FIRST + 1)
    with started(tmp_path, tmp_path, "--follow") as server:
        stop = threading.Event()
        clients = [Client(server.url, n % 2 == 0, n, stop) for n in range(4)]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        try:
            # when ten versions come while four clients ask
            for version in range(FIRST + 1, LAST + 1):
                publish_again(run_dir, copy, version)
                eventually(
                    lambda name=f"{RUN}@v{version}": any(c.newest == name for c in clients),
                    f"version {version} answers",
                    deadline_s=DEADLINE_S,
                    context=server.log.read_text,
                    poll_s=0.1,
                )
                assert server.models() == [f"{RUN}@v{version}", RUN]
            # and one whose weights are not what was published
            publish_again(run_dir, copy, TAMPERED, tampered=True)
            eventually(
                lambda: "is refused" in server.log.read_text(),
                "the tampered version is refused",
                deadline_s=DEADLINE_S,
                poll_s=0.1,
            )
            count = len(clients[0].answers)
            eventually(
                lambda: len(clients[0].answers) > count + 3,
                "the last still answers",
                deadline_s=DEADLINE_S,
                poll_s=0.1,
            )
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        # then every question was answered, by one version, as that version alone answers
        expected = {v: greedy(weights_folder(run_dir) / f"v{v}") for v in range(FIRST, LAST + 1)}
        for client in clients:
            assert not client.lost
            served = [int(model.removeprefix(f"{RUN}@v")) for model, _, _ in client.answers]
            assert served == sorted(served) and served[-1] == LAST
            for version, (_, which, tokens) in zip(served, client.answers, strict=True):
                assert tokens == expected[version][which], version
        every = {model for client in clients for model, _, _ in client.answers}
        assert every == {f"{RUN}@v{version}" for version in expected}
        distinct = {tuple(tokens) for answers in expected.values() for tokens in answers}
        assert len(distinct) == len(expected) * len(PROMPTS)
        # and one line says why the tampered version is not served
        lines = [line for line in server.log.read_text().splitlines() if "is refused" in line]
        assert [line for line in lines if f"not version {TAMPERED} of {RUN}" in line] == lines
        assert len(lines) == 1
        # and a fixed version is served by its name while it is the newest
        assert server.complete(f"{RUN}@v{LAST}", PROMPTS[0]).status_code == 200
        refused = server.complete(f"{RUN}@v{FIRST}", PROMPTS[0])
        assert refused.status_code == 404
        assert f"{RUN}@v{LAST}" in refused.json()["error"]["message"]
        # when the engine dies, then the command says so and fails
        engines = psutil.Process(server.process.pid).children(recursive=True)
        [engine] = [each for each in engines if "EngineCore" in each.name()]
        os.kill(engine.pid, signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "vLLM: the server ended with exit code" in server.log.read_text()
