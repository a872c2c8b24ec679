"""`runspec serve` and `chat` on a published version: vLLM's own server, on checked files."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bridge.conversion import import_model
from bridge.publisher import Publisher
from runspec.cli.chat import messages, print_reply
from runspec.cli.serve import link_files, served
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import params_folder, weights_folder
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.identity import make_identity
from sampler.tasks.prompts import PromptForm
from sampler.tasks.traces import build_warm_start_data
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import small_spec
from tests.sampler.engine.models import save_version
from tests.sampler.worker.works import free_port
from tests.waiting import eventually

QUESTION = "stop"
DEADLINE_S = 240.0


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """The folder of a run `small` whose versions 0 and 1 are published."""
    spec, run_dir = small_spec(), tmp_path / "runs" / "small"
    run_dir.mkdir(parents=True)
    write_atomic(run_dir / "spec.json", dump_resolved(spec))
    make_identity(run_dir, spec)
    for version in (0, 1):
        model = save_version(tmp_path / f"m{version}", seed=version)
        build_warm_start_data(spec).write_tokenizer(model)
        if version == 0:
            (run_dir / "initial").symlink_to(model)
        checkpoint = params_folder(run_dir, spec) / f"v{version}"
        import_model(model, checkpoint / "params")
        (checkpoint / "probe.json").write_bytes((model / "probe.json").read_bytes())
    Publisher(run_dir, spec, logging.getLogger("test")).publish_new()
    return tmp_path / "runs"


@pytest.fixture
def server(runs_dir: Path, tmp_path: Path) -> Iterator[str]:
    """The URL at which `runspec serve small` answers."""
    port = free_port()
    command = [sys.executable, "-m", "runspec", "serve", "small", "--port", str(port)]
    command += ["--runs-dir", str(runs_dir)]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        eventually(
            lambda: _answers(f"{url}/health"),
            "the server answers",
            deadline_s=DEADLINE_S,
            hopeless=lambda: "" if process.poll() is None else "it ended",
            context=log.read_text,
            poll_s=0.2,
        )
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_a_version_answers_under_its_names(server: str, runs_dir: Path) -> None:
    names = [model["id"] for model in httpx.get(f"{server}/v1/models").json()["data"]]
    assert names == ["small", "small@v1"]
    # each name is the same version, whose greedy tokens are transformers' on its files
    found = []
    for name in names:
        body = {"model": name, "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0.0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        answer = httpx.post(f"{server}/v1/completions", json=body, timeout=60.0).json()
        found.append(answer["choices"][0]["token_ids"])
    assert found[0] == found[1] == _greedy(weights_folder(runs_dir / "small") / "v1", [5, 6, 7, 8])
    # and a version that is not served has no name here
    refused = httpx.post(f"{server}/v1/completions", json={"model": "small@v0", "prompt": "a"})
    assert refused.status_code == 404


def _greedy(folder: Path, prompt: list[int]) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    for _ in range(8):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_names_say_whether_it_is_the_newest(runs_dir: Path) -> None:
    assert served("small", runs_dir).names == ("small", "small@v1")
    assert served("small@0", runs_dir).names == ("small@v0",)
    folder = weights_folder(runs_dir / "small") / "v0"
    assert served(str(folder), runs_dir).names == ("v0",)


def test_tampered_files_are_refused_before_anything_starts(runs_dir: Path) -> None:
    path = weights_folder(runs_dir / "small") / "v1" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = runspec("serve", "small", "--runs-dir", runs_dir)
    assert done.returncode == 1
    assert "not version 1 of small" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(UserError, match="version 7 is not here"):
        served("small@7", runs_dir)


def test_what_is_removed_meanwhile_is_still_served(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "other.txt").write_text("x")
    link_files(source, tmp_path / "all")
    link_files(source, tmp_path / "some", only=("config.json",))
    (source / "config.json").unlink()
    assert (tmp_path / "all" / "config.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["config.json"]


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("target", [None, 24])
def test_a_chat_asks_as_the_run_does(role: str, target: int | None) -> None:
    spec: RunSpec = small_spec("small", 5, f"data.length_prompt_role={role}")
    data = spec.data.model_copy(update={"system_prompt": "Be brief."})
    expected = PromptForm.of(data).messages(QUESTION, target)
    assert messages(data, QUESTION, target) == expected
    assert messages(None, QUESTION, target) == [{"role": "user", "content": QUESTION}]


def test_thinking_is_dim_and_what_cannot_be_printed_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = [("so \x1b[31m", 1), ("long</th", 2), ("ink>pots", 3), ("\n", 4)]
    reply = print_reply(iter(pieces), dim=True)
    assert (reply.text, reply.tokens) == ("so \x1b[31mlong</think>pots\n", 4)
    shown = capsys.readouterr().out
    assert shown == "\033[2mso ?[31mlong</think>\033[0mpots\n\033[0m"
    print_reply(iter(pieces), dim=False)
    assert capsys.readouterr().out == "so ?[31mlong</think>pots\n"
    assert json.dumps(reply.text)
