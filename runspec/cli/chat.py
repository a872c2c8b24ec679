"""`runspec chat`: talks to a version in the terminal, thinking shown dim."""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from runspec.cli.serve import HOST, Served, await_server, free_port, served, serving
from runspec.core.errors import UserError

THINK_END = "</think>"
ANSWER_S = 600.0
_DIM, _PLAIN = "\033[2m", "\033[0m"


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
    speakers = [(served(name, runs_dir), free_port()) for name in names]
    with tempfile.TemporaryDirectory(prefix="runspec-chat-") as folder, ExitStack() as up:
        for number, (found, port) in enumerate(speakers):
            print(f"loading {found.names[-1]}", file=sys.stderr)
            log = Path(folder) / f"{number}.log"
            await_server(up.enter_context(serving(found, HOST, port, log=log)), port, log)
        _talk(speakers, target, max_tokens)
    return 0


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
            messages = [{"role": "user", "content": question}]
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
