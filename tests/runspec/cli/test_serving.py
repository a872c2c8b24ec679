"""Real engines: a served version gives vLLM's own tokens, a followed run loses no request.

vLLM's import takes ten seconds of a core: processes are forked from a server that has it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from runspec.cli.evaluation_suites import ROWS
from runspec.cli.follow import serve_command
from runspec.cli.serve import HOST, await_server
from runspec.core.run_files import weights_folder
from runspec.core.schema.load import load_resolved
from runspec.local.endpoints import port_answers
from sampler.tasks.traces import build_warm_start_data
from tests.harness import ROOT, free_port
from tests.preloaded import Program
from tests.runspec.cli.in_process import runspec
from tests.runspec.cli.published import RUN, first_versions, publish_again, publish_run
from tests.runspec.local.fake_run import small_spec
from tests.sampler.engine.models import save_version
from tests.waiting import eventually

pytestmark = pytest.mark.slow

FIRST, LAST, TAMPERED = 1, 4, 5
"""Versions: served first, served last, and never served."""
TOKENS = 16
PROMPTS = [[5 + i, 60 + i, 7, 100 + i] for i in range(3)]
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}


class Forked(Program):
    """`python -m MODULE ARGUMENTS` in a process that has vLLM imported."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **others: Any) -> None:
        code = "from tests.runspec.cli.test_serving import main; main()"
        log = Path(env["SERVING_LOG"])
        super().__init__(code, json.dumps(dict(env)), *command[2:], log=log)


def main() -> None:
    """What a forked process runs: its environment and a module with arguments."""
    import runpy

    os.setsid()
    _, environment, module, *arguments = sys.argv
    os.environ.update(json.loads(environment))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.fixture
def forked(preload_server, tmp_path, monkeypatch):
    """`serve` and `evaluate` fork what they start; yields the log of it."""

    def run(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, Forked(command, **how).wait())

    module = SimpleNamespace(Popen=Forked, run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("runspec.cli.serve.subprocess", module)
    monkeypatch.setattr("runspec.cli.evaluate.subprocess", module)
    monkeypatch.setenv("SERVING_LOG", str(tmp_path / "forked.log"))
    yield tmp_path / "forked.log"


def greedy(folder: Path) -> list[list[int]]:
    """transformers' answers to the prompts, on the files of a version."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(PROMPTS)
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[:, len(PROMPTS[0]) :].tolist()


def complete(url: str, model: str, prompt: Sequence[int], **how: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "return_token_ids": True, **how}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=600.0)


def models(url: str) -> list[str]:
    found = httpx.get(f"{url}/v1/models", timeout=600.0).json()["data"]
    return [model["id"] for model in found]


def offline() -> None:
    """Writes what vLLM answers without a server, by parameters and prompt."""
    from vllm import LLM, SamplingParams

    from sampler.engine.worker_extension import OneRank

    _, folder, answers = sys.argv
    engine = {"dtype": "float32", "max_model_len": 112, "block_size": 32, "enforce_eager": True}
    engine |= {"kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True}
    model = LLM(folder, **engine, distributed_executor_backend=OneRank)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = [
        [list(output.outputs[0].token_ids) for output in model.generate(prompts, parameters)]
        for parameters in (SamplingParams(**how, detokenize=False) for how in (GREEDY, SEEDED))
    ]
    Path(answers).write_text(json.dumps(found))


def test_a_server_answers_what_vllm_answers_without_one(tmp_path, forked):
    # given a run with versions 0 and 1, and vLLM's own answers on the files of version 1
    run_dir, answers = publish_run(tmp_path, FIRST + 1, tied=True), tmp_path / "answers.json"
    folder, port = weights_folder(run_dir) / f"v{FIRST}", free_port()
    code = "import os; os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'\n"
    code += "from tests.runspec.cli.test_serving import offline; offline()"
    assert Program(code, folder, answers, log=forked).wait() == 0, forked.read_text()
    expected = json.loads(answers.read_text())
    assert expected[0] == greedy(folder) != expected[1]

    ended = threading.Event()

    def asked() -> tuple[list[str], list[Any], int]:
        url = f"http://{HOST}:{port}"
        try:
            eventually(
                lambda: port_answers(HOST, port) and httpx.get(f"{url}/health").is_success,
                "it answers",
                hopeless=lambda: "the server ended" if ended.is_set() else "",
                context=forked.read_text,
            )
            found = [
                [
                    complete(url, name, prompt, **how).json()["choices"][0]["token_ids"]
                    for prompt in PROMPTS
                ]
                for name in models(url)
                for how in (GREEDY, SEEDED)
            ]
            return models(url), found, complete(url, f"{RUN}@v0", PROMPTS[0]).status_code
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    # when it is served until somebody stops it
    with ThreadPoolExecutor(1) as client:
        answered = client.submit(asked)
        try:
            context, runs = SimpleNamespace(args=[]), run_dir.parent
            assert serve_command(context, RUN, HOST, port, runs_dir=runs) == 0
        finally:
            ended.set()
    # then the newest version has both names, under which it gives the same tokens, and no other
    assert answered.result() == ([RUN, f"{RUN}@v{FIRST}"], expected * 2, 404)


@pytest.mark.nightly
def test_the_command_shows_its_own_words_and_leaves_nothing(tmp_path):
    # given a run whose model writes </think>, a special token, or not, as it likes
    run_dir, port, log = publish_run(tmp_path, FIRST), free_port(), tmp_path / "log"
    url, temporary = f"http://{HOST}:{port}", Path(tempfile.mkdtemp())  # its path is short
    command = [sys.executable, "-m", "runspec", "serve", RUN, "--page", "--port", str(port)]
    command += ["--runs-dir", str(run_dir.parent)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)
    await_server(server, port, log)
    # when it is asked by the words of training, as a chat and as plain text
    how = {"model": RUN, "temperature": 0.0, "max_tokens": TOKENS}
    prompt = f"{load_resolved(run_dir).data.prompt_messages('dog', 8)[-1]['content']}\n<think>"
    plain = {**how, "prompt": prompt, "skip_special_tokens": False}
    raw = httpx.post(f"{url}/v1/completions", json=plain, timeout=600.0).json()["choices"][0]
    body = {**how, "messages": [{"role": "user", "content": "dog"}], "target": 8}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600.0).json()["choices"][0]
    # then the tokens are the same, and the thinking is apart
    thought, _, rest = raw["text"].partition("</think>")
    message = found["message"]
    assert (message.get("reasoning_content", ""), message["content"] or "") == (thought, rest)
    assert "<textarea" in httpx.get(url).text
    # when Ctrl-C ends it, then nothing but its own words was printed, and no file is left
    server.send_signal(signal.SIGINT)
    assert server.wait() == 0
    lines = log.read_text().splitlines()
    assert {line.partition(" ")[0] for line in lines} <= {"vLLM", "ready:", "page:"}, lines
    assert lines[-2:] == [f"ready: {RUN} and {RUN}@v0 at {url}/v1", f"page: {url}/"]
    temporary.rmdir()


def test_a_suite_is_asked_of_any_model(tmp_path, forked):
    # given a directory that no run made
    weights = save_version(tmp_path / "model")
    build_warm_start_data(small_spec()).write_tokenizer(weights)
    (weights / "probe.json").unlink()
    row = {"task_type": "math", "verification_info": json.dumps({"ground_truth": "4"})}
    for name, prompts in (
        ("asked", ["one and one", "two and two", "three and one"]),
        ("trained", ["Two and two!", "four and none"]),
    ):
        rows = [{**row, "problem_id": f"{name}-{i}", "prompt": p} for i, p in enumerate(prompts)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "suite.yaml").write_text(
        "data:\n  sources:\n    - {name: asked, kind: jsonl, uri: asked.jsonl, train: false}\n"
        "    - {name: trained, kind: jsonl, uri: trained.jsonl}\n"
        "reward: [{name: math, kind: math}]\n"
        "evaluations: [{name: asked, source: asked, samples: 2, max_new_tokens: 8}]\n"
    )
    # when a suite is asked of it
    suite = tmp_path / "suite.yaml"
    done = runspec("evaluate", weights, "--suite", suite, "--overlap", "--json")
    assert done.returncode == 0, forked.read_text()
    found = json.loads(done.stdout)["asked"]
    # then every problem has its answers, within the length that was asked for
    assert [each["problem_id"] for each in found["problems"]] == ["asked-0", "asked-1", "asked-2"]
    assert all(0 < n <= 8 for each in found["problems"] for n in each["lengths"])
    assert set(found["figures"]) == {"mean", "pass-2", "majority", "length"}
    # and what is trained on is named
    assert found["overlap"] == [{"problem_id": "asked-1", "exact": True, "trained": "trained-0"}]
    assert "waits for vLLM to load" in forked.read_text()
    # and rows alone are asked, too; where no answer is right, three are shown with the reason
    short = ("--set", f"evaluations.{ROWS}.max_new_tokens=8")
    done = runspec("evaluate", weights, "--data", tmp_path / "asked.jsonl", *short)
    assert done.returncode == 0, forked.read_text()
    assert f"source {ROWS}: 3 to ask" in forked.read_text()
    assert "to train on" not in forked.read_text().rpartition(f"source {ROWS}")[2]
    lines = done.stdout.splitlines()
    assert lines[0] == f"{ROWS}: 3 problems, 0 without a grade"
    shown = [line for line in lines if line.startswith("  asked-")]
    why = "no </think> with an answer and the end token after it"
    assert shown == [f"  asked-{i}: reward 0, {why}" for i in range(3)]


def ask(url: str, stop: threading.Event, answers: list[dict[str, Any]]) -> None:
    """Asks one question after the other; every answer is of one version, and whole."""
    with httpx.Client(base_url=url, timeout=600.0) as http:
        while not stop.is_set():
            which = len(answers) % len(PROMPTS)
            body = {"model": RUN, "prompt": PROMPTS[which], "return_token_ids": True, **GREEDY}
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines.pop() == "data: [DONE]"
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            tokens = [token for each in events for token in each["choices"][0]["token_ids"] or []]
            [model] = {event["model"] for event in events}
            answers.append({"model": model, "which": which, "tokens": tokens})


@pytest.mark.nightly
def test_under_load_a_server_follows_versions_and_loses_nothing(tmp_path):
    # on CPUs a load may leave a tied head stale
    run_dir = publish_run(tmp_path / "published", TAMPERED + 1, tied=True)
    copy, port, log = first_versions(run_dir, tmp_path, FIRST + 1), free_port(), tmp_path / "log"
    url, stop = f"http://{HOST}:{port}", threading.Event()
    words = ("serve", RUN, "--follow", "--port", str(port), "--runs-dir", str(tmp_path))
    answers: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    with log.open("wb") as out, ThreadPoolExecutor(4) as clients:
        server = subprocess.Popen(
            [sys.executable, "-m", "runspec", *words], cwd=ROOT, stdout=out, stderr=out
        )
        await_server(server, port, log)
        asking = [clients.submit(ask, url, stop, each) for each in answers]
        try:
            # when versions come while four clients ask
            for version in range(FIRST, LAST + 1):
                if version > FIRST:
                    publish_again(run_dir, copy, version)
                name = f"{RUN}@v{version}"
                eventually(
                    lambda name=name: all(a and a[-1].get("model") == name for a in answers),
                    f"version {version} answers",
                    hopeless=lambda: "a client ended" if any(a.done() for a in asking) else "",
                    context=log.read_text,
                )
                assert models(url) == [name, RUN]
            # and one whose weights are not what was published
            publish_again(run_dir, copy, TAMPERED, tampered=True)
            eventually(lambda: "is refused" in log.read_text(), "the tampered version is refused")
            count = len(answers[0])
            eventually(lambda: len(answers[0]) > count + 3, "the last still answers")
        finally:
            stop.set()
    # then every question was answered, by one version, as that version alone answers
    assert [client.exception() for client in asking] == [None] * 4
    expected = {
        f"{RUN}@v{v}": greedy(weights_folder(run_dir) / f"v{v}") for v in range(FIRST, LAST + 1)
    }
    for each in answers:
        served_by = [answer["model"] for answer in each]
        assert served_by == sorted(served_by) and set(served_by) == set(expected)
        for answer in each:
            assert answer["tokens"] == expected[answer["model"]][answer["which"]]
    # and one line says why the tampered version is not served
    [line] = [line for line in log.read_text().splitlines() if "is refused" in line]
    assert f"not version {TAMPERED} of {RUN}" in line
    # and a fixed version is served by its name while it is the newest
    assert complete(url, f"{RUN}@v{LAST}", PROMPTS[0]).status_code == 200
    refused = complete(url, f"{RUN}@v{FIRST}", PROMPTS[0])
    assert refused.status_code == 404
    assert f"{RUN}@v{LAST}" in refused.json()["error"]["message"]
    # when the engine dies, then the command says so and fails
    children = psutil.Process(server.pid).children(recursive=True)
    [engine] = [each for each in children if "EngineCore" in each.name()]
    os.kill(engine.pid, signal.SIGKILL)
    assert server.wait() == 1
    assert "vLLM: the server ended with exit code" in log.read_text()
