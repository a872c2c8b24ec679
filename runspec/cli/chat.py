"""`runspec chat`: talks to a version in the terminal, thinking shown dim."""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.cli.lifecycle import run_and_version
from runspec.cli.serve import HOST, Served, await_server, free_port, served, serving
from runspec.core.errors import UserError
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import Data
from runspec.local.run_dir import find_run

THINK_END = "</think>"
ANSWER_S = 600.0
_DIM, _PLAIN = "\033[2m", "\033[0m"


@dataclass(frozen=True)
class Speaker:
    """A version that answers."""

    found: Served
    port: int
    data: Data | None
    """How the run puts problems to the policy; None for a model that no run made."""


@dataclass(frozen=True)
class Reply:
    """An answer that has ended."""

    text: str
    tokens: int


def chat_command(
    what: str, target: int | None, compare: str | None, max_tokens: int | None, runs_dir: Path
) -> int:
    """Ask for questions and answer them until the input ends; return 0.

    Args:
        what: NAME, NAME@VERSION, or a Hugging Face directory.
        target: length to think for, in tokens, in the run's own words; None asks for none.
        compare: another version, which answers too.
        max_tokens: longest answer; None leaves it to the server.
        runs_dir: folder of runs.

    Raises:
        UserError: a version cannot be served.
    """
    names = [what, *([compare] if compare is not None else [])]
    speakers = [
        Speaker(served(name, runs_dir), free_port(), _data(name, runs_dir)) for name in names
    ]
    with tempfile.TemporaryDirectory(prefix="runspec-chat-") as folder, ExitStack() as up:
        for number, speaker in enumerate(speakers):
            print(f"loading {speaker.found.names[-1]}", file=sys.stderr)
            log = Path(folder) / f"{number}.log"
            server = up.enter_context(serving(speaker.found, HOST, speaker.port, log=log))
            await_server(server, speaker.port, log)
        _talk(speakers, target, max_tokens)
    return 0


def _talk(speakers: Sequence[Speaker], target: int | None, max_tokens: int | None) -> None:
    """Answer line after line; every question stands alone, as in training."""
    terminal = sys.stdout.isatty()
    for question in _questions():
        for speaker in speakers:
            if len(speakers) > 1:
                print(f"[{speaker.found.names[-1]}]")
            body = {"messages": messages(speaker.data, question, target)}
            thinks = speaker.data is None or speaker.data.thinking != "none"
            reply = print_reply(_pieces(speaker, body, max_tokens), dim=terminal and thinks)
            asked = "" if target is None else f", {target} were asked for"
            print(f"\n({reply.tokens} tokens{asked})\n")


def _questions() -> Iterator[str]:
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question:
            yield question


def messages(data: Data | None, question: str, target: int | None) -> list[dict[str, str]]:
    """Return a question as the run puts it to its policy (`sampler.tasks.prompts.PromptForm`)."""
    system, length = "", ""
    if data is not None:
        system = data.system_prompt or ""
        length = "" if target is None else data.length_prompt.replace("{target}", str(target))
        if data.length_prompt_role == "system":
            system, length = "\n".join(text for text in (system, length) if text), ""
    user = "\n".join(text for text in (question, length) if text)
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": user}]


def print_reply(pieces: Iterator[tuple[str, int]], *, dim: bool) -> Reply:
    """Print an answer as it comes: its thinking dim, what cannot be printed as `?`.

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
    return Reply(text, count)


def _pieces(
    speaker: Speaker, body: dict[str, Any], max_tokens: int | None
) -> Iterator[tuple[str, int]]:
    """Yield the pieces of an answer, from the server's events.

    Raises:
        UserError: the server refuses, or ends the answer early.
    """
    body = {**body, "model": speaker.found.names[0], "stream": True, "skip_special_tokens": False}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    connection = http.client.HTTPConnection(HOST, speaker.port, timeout=ANSWER_S)
    with closing(connection):
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refused(speaker, answer.read(2000).decode(errors="replace"))
            for line in answer:
                if line.startswith(b"data: ") and (data := line[6:].strip()) != b"[DONE]":
                    event = json.loads(data)
                    tokens = (event.get("usage") or {}).get("completion_tokens", 0)
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or "", tokens
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise _refused(speaker, repr(error)) from error


def _refused(speaker: Speaker, why: str) -> UserError:
    return UserError(
        f"no answer: {why[:500]}", place=speaker.found.names[-1], remedy="ask something shorter"
    )


def _data(what: str, runs_dir: Path) -> Data | None:
    if (Path(what) / "config.json").is_file():
        return None
    return load_resolved(find_run(run_and_version(what)[0], runs_dir)).data
