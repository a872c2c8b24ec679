"""vLLM's OpenAI-compatible server on a run's version, or on any model; and `runspec chat`.

`chat` talks to such a server in the terminal, with the thinking shown dim.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from broadcast.manifest import WeightsManifest
from runspec import cli
from runspec.cli.runs import run_and_version
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError, one_line
from runspec.core.models import TOKENIZER_NAMES
from runspec.core.models.family import load_config
from runspec.core.models.parameters import CPU_BLOCK_TOKENS, MAX_SEQUENCES, cpu_kv_bytes
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.schema.role_names import evaluator_pool
from runspec.lint import TokenizerFiles
from runspec.lint.rules.data import opens_thinking
from runspec.local.backend import last_lines
from runspec.local.machine import module_is_installed, vllm_environment
from runspec.local.model_folders import published_version

SERVER = "vllm.entrypoints.openai.api_server"
_ONE_RANK = "sampler.engine.worker_extension.OneRank"
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
START_S = 600.0
"""Longest start of a server; a large model takes minutes to load."""
HOST = "127.0.0.1"
_END_S = 10.0
LOOK_S = 0.2
TELL_S = 10.0
"""Seconds between two lines that say what is waited for."""


@dataclass(frozen=True)
class Served:
    """What is served."""

    folder: Path
    """A Hugging Face directory."""
    manifest: WeightsManifest | None
    """Of a run's version; None for any other model."""
    names: tuple[str, ...]
    """Names of the model: NAME@vN, and NAME where that is the newest version."""
    spec: RunSpec | None
    """Of the run; None for any other model."""
    pool: SamplerPool
    """Settings of the engine; `max_model_len` are the most tokens of prompt and answer."""


def served(what: str, runs_dir: Path) -> Served:
    """Return what to serve.

    Args:
        what: NAME, NAME@VERSION, or a Hugging Face directory.
        runs_dir: folder of runs.

    Raises:
        UserError: there is no such version, or its manifest cannot be believed.
    """
    folder = Path(what)
    if (folder / "config.json").is_file():
        pool = bare_pool(load_config(folder).max_position_embeddings)
        return Served(folder.absolute(), None, (folder.absolute().name,), None, pool)
    run_dir, spec, version = run_and_version(what, runs_dir)
    found = published_version(run_dir, spec, version)
    fixed = f"{spec.name}@v{found.manifest.version}"
    names = (spec.name, fixed) if version is None else (fixed,)
    return Served(found.folder, found.manifest, names, spec, evaluator_pool(spec))


def bare_pool(length: int) -> SamplerPool:
    """Return settings for a model that no run made: this machine's GPU, else its CPU."""
    on_cpu = not Path("/dev/nvidia0").exists()
    return SamplerPool.model_validate(
        {
            "name": "engine",
            "trust": "trusted",
            "hardware": {"kind": "cpu" if on_cpu else "gpu"},
            "dtype": "float32" if on_cpu else "bfloat16",
            "max_model_len": length,
            "max_new_tokens": max(1, length // 2),
        }
    )


def _options(pool: SamplerPool, folder: Path) -> tuple[str, ...]:
    """Return vLLM's options for a pool's engine settings."""
    options = ["--max-model-len", str(pool.max_model_len), "--dtype", str(pool.dtype)]
    options += ["--tensor-parallel-size", str(pool.parallel.tensor)]
    if pool.hardware.kind == "cpu":
        room = cpu_kv_bytes(pool, load_config(folder))
        options += ["--kv-cache-memory-bytes", str(room), "--max-num-seqs", str(MAX_SEQUENCES)]
        options += ["--block-size", str(CPU_BLOCK_TOKENS), "--enforce-eager"]
        if pool.parallel.tensor == 1:  # half the memory: no process beside the engine core
            options += ["--distributed-executor-backend", _ONE_RANK]
    return tuple(options)


def _opening(spec: RunSpec | None, folder: Path) -> list[str]:
    """Return vLLM's option for a template that opens the thinking, where only the run's prompts do.

    Args:
        spec: of the run.
        folder: of the tokenizer; the template is written to it.
    """
    files = TokenizerFiles.read(folder)
    opens = files is None or files.template is None or opens_thinking(files)
    if spec is None or not spec.data.think_prefill or opens:
        return []
    path, opening = folder / "opening.jinja", "{% if add_generation_prompt %}{{ '<think>\\n' }}"
    source = (files and files.template) or ""
    path.write_text(source.removesuffix("\n") + opening + "{% endif %}")
    return ["--chat-template", str(path)]


def server_failed(why: str, log: Path | None = None) -> UserError:
    """Return the error of a server that failed, with the end of its log."""
    said = "" if log is None else "".join(f"\n{line}" for line in last_lines(log, 20))
    return UserError(
        f"the server {why}{said}",
        place="vLLM",
        remedy="see what it printed; out of memory is the usual cause (`dmesg` names it)",
    )


@contextmanager
def serving(
    found: Served,
    host: str,
    port: int,
    more: Sequence[str] = (),
    log: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    descriptors: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server on checked files; it ends with the block.

    The files are linked into a folder of their own and checked there, so that a publisher that
    removes the version meanwhile takes nothing away.

    Args:
        found: what to serve.
        host, port: where it listens.
        more: further options of vLLM's server.
        log: file of what it prints; None leaves that to this process's output.
        environment: further variables of the server.
        descriptors: open files that it inherits.

    Raises:
        UserError: vLLM is not installed, or the files are not what was published.
    """
    if not module_is_installed("vllm"):
        raise UserError(
            "vLLM is not installed here", place="serve", remedy=install_command("sampler-cuda")
        )
    with socket_folder() as temporary:
        model, tokenizer = Path(temporary) / "model", Path(temporary) / "tokenizer"
        link_files(found.folder, model)
        if found.manifest is not None:
            from bridge.model_files import require_published  # draws numpy

            require_published(model, found.manifest)
        # Beside config.json, transformers would choose a tokenizer by the model's family.
        link_files(model, tokenizer, only=TOKENIZER_NAMES)
        command = [sys.executable, "-m", SERVER, "--model", str(model)]
        command += ["--tokenizer", str(tokenizer), "--served-model-name", *found.names]
        command += _opening(found.spec, tokenizer)
        command += ["--host", host, "--port", str(port), *_options(found.pool, model)]
        on_cpu = found.pool.hardware.kind == "cpu"
        # Its sockets and files of a moment are gone with this folder, however it ends.
        variables = _QUIET | {"TMPDIR": temporary} | vllm_environment((), on_cpu=on_cpu, tensor=1)
        with ExitStack() as up:
            out = None if log is None else up.enter_context(log.open("wb"))
            process = subprocess.Popen(
                [*command, *more],
                env={**os.environ, **variables, **environment},
                pass_fds=descriptors,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                end_group(process)


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder whose path leaves room for a socket's: 107 bytes are the most."""
    usual = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="runspec-serve-",
        dir=usual if len(usual) < 47 else "/tmp",  # noqa: S108 - its owner alone may enter it
        ignore_cleanup_errors=True,
    )


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def await_server(
    server: subprocess.Popen[bytes], port: int, log: Path, stops: Callable[[], int] = lambda: 0
) -> None:
    """Wait until a server answers, or `stops` says that it is not needed.

    Args:
        server: ends if it cannot start.
        port: where it will answer.
        log: gets its words.
        stops: number of requests to stop.

    Raises:
        UserError: it ended, or does not answer in time.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None and not stops():
        connection = http.client.HTTPConnection(HOST, port, timeout=5.0)
        with closing(connection):
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass  # not yet
        time.sleep(LOOK_S)
    if stops():
        return
    ended = server.poll()
    why = f"ended with exit code {ended}" if ended is not None else f"not up in {START_S:.0f} s"
    raise server_failed(why, log)


def link_files(source: Path, target: Path, only: Sequence[str] = ()) -> None:
    """Make a folder with the files of another one: hard links, or copies on another disk."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and (not only or path.name in only):
            try:
                os.link(path.resolve(), target / path.name)
            except OSError:
                shutil.copyfile(path, target / path.name)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


THINK_END = "</think>"
ANSWER_S = 600.0
_DIM, _PLAIN = "\033[2m", "\033[0m"


def chat_command(
    what: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, or a Hugging Face directory.")],
    target: Annotated[
        int | None, typer.Option("--target", min=1, help="Tokens to think for.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="Another version, which answers too.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")
    ] = None,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Ask for questions and answer them until the input ends; return 0.

    The target is asked for in the run's own words.

    Raises:
        UserError: a version cannot be served.
    """
    names = [what, *([compare] if compare is not None else [])]
    speakers = [(served(name, runs_dir), free_port()) for name in names]
    with tempfile.TemporaryDirectory(prefix="runspec-chat-") as folder, ExitStack() as up:
        for number, (found, port) in enumerate(speakers):
            print(f"loading {found.names[-1]}", file=sys.stderr)
            log = Path(folder) / f"{number}.log"
            server = up.enter_context(serving(found, HOST, port, log=log))
            await_server(server, port, log, telling(found.names[-1], log))
        _talk(speakers, target, max_tokens)
    return 0


def telling(name: str, log: Path) -> Callable[[], int]:
    """Return a `stops` for `await_server` that never stops, and tells how the load goes."""
    began = said = time.monotonic()

    def tell() -> int:
        nonlocal said
        now = time.monotonic()
        if now - said >= TELL_S:
            said = now
            newest = one_line("".join(last_lines(log, 1)), 120) or "vLLM starts"
            print(f"loading {name} for {now - began:.0f} s: {newest}", file=sys.stderr)
        return 0

    return tell


def _talk(
    speakers: Sequence[tuple[Served, int]], target: int | None, max_tokens: int | None
) -> None:
    """Answer line after line by models at ports; every question stands alone, as in training."""
    terminal = sys.stdout.isatty()
    for question in _questions():
        for found, port in speakers:
            if len(speakers) > 1:
                print(f"[{found.names[-1]}]")
            data = None if found.spec is None else found.spec.data
            messages: list[Any] = [{"role": "user", "content": question}]
            if data is not None:
                messages = data.prompt_messages(question, target)
            thinks = data is None or data.thinking != "none"
            pieces = _pieces(found, port, {"messages": messages}, max_tokens)
            tokens = print_reply(pieces, dim=terminal and thinks)
            asked = "" if target is None else f", {target} were asked for"
            print(f"\n({tokens} tokens{asked})\n")


def _questions() -> Iterator[str]:
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question:
            yield question


def print_reply(pieces: Iterator[tuple[str, int]], *, dim: bool) -> int:
    """Print an answer as it comes, and return its tokens.

    The thinking is dim, and what cannot be printed is `?`.

    Args:
        pieces: text, and the number of tokens so far.
        dim: whether the terminal shows colours.
    """
    text, count, thinking = "", 0, True
    if dim:
        sys.stdout.write(_DIM)
    for piece, tokens in pieces:
        text, count = text + piece, max(count, tokens)
        shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in piece)
        if dim and thinking and THINK_END in text:
            before, _, after = shown.partition(">")
            shown, thinking = f"{before}>{_PLAIN}{after}", False
        sys.stdout.write(shown)
        sys.stdout.flush()
    if dim:
        sys.stdout.write(_PLAIN)
    return count


def _pieces(
    found: Served, port: int, body: dict[str, Any], max_tokens: int | None
) -> Iterator[tuple[str, int]]:
    """Yield the pieces of an answer, from the server's events.

    Raises:
        UserError: the server refuses, or ends the answer early.
    """
    body = {**body, "model": found.names[0], "stream": True, "skip_special_tokens": False}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    with closing(connection):
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refused(found, answer.read(2000).decode(errors="replace"))
            for line in answer:
                if line.startswith(b"data: ") and (data := line[6:].strip()) != b"[DONE]":
                    event = json.loads(data)
                    tokens = (event.get("usage") or {}).get("completion_tokens", 0)
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or "", tokens
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise _refused(found, repr(error)) from error


def _refused(found: Served, why: str) -> UserError:
    return UserError(
        f"no answer: {why[:500]}", place=found.names[-1], remedy="ask something shorter"
    )
