"""HTTP front of a served model: the only way to vLLM's server, which listens at a Unix socket.

The front answers an allow-list of paths, of which none changes weights, adapters, scale or state.

| path | answer |
|---|---|
| `/health` | 200 once the model is loaded, for everybody |
| `/v1/models`, `/v1/completions` | vLLM's |
| `/v1/chat/completions` | vLLM's, with the thinking apart as `reasoning_content` |
| `/` | the page, where it is wanted |
| `/register`, `/login` | a key for a name and a password, where there are accounts |

A chat request may have the field `target`. The messages then are the ones that training makes of a
problem and a target length.
"""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from runspec.core.connection_limits import ConnectionLimits, connection_of
from runspec.core.http_server import TokenBuckets, at_once, client_address
from runspec.core.schema import RunSpec
from runspec.core.schema.training import Data
from runspec.lint import TokenizerFiles
from runspec.lint.rules.data import opens_thinking, thinking_of
from runspec.local.dashboard.page import html_page
from runspec.local.dashboard.server import names_this_machine, not_kept
from runspec.local.identity import Accounts, Refused

LIMITS = ConnectionLimits(256, idle_s=75.0, head_s=30.0, header_bytes=8190, linger_s=2.0)
MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_S = 60.0
"""Seconds for a request's body to arrive."""
ANSWER_S = 600.0
"""Seconds without a byte from vLLM, after which a request has failed."""
SEND_S = 60.0
"""Seconds for a client to take a piece of its answer."""
AT_ONCE = 4
"""Requests of one account at once."""
MAX_ENTRY_BYTES = 4096
"""Body of a request with name and password."""
ATTEMPT_S, ATTEMPTS = 10.0, 10
"""Attempts to log in or register, of one address or for one name, and seconds to regain one."""
THINK, THINK_END = "<think>", "</think>"
_HEALTH = "http://vllm/health"
_OWN_MACHINE = [ip_network("127.0.0.0/8"), ip_network("::1/128")]
_CHAT = "/v1/chat/completions"


class Thinking:
    """Divides an output, piece by piece, into the thinking and the rest.

    Args:
        opened: whether the prompt opens the thinking; else `<think>` at the start does.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened, self._at_start, self._held = opened, True, ""

    def take(self, piece: str, *, last: bool) -> tuple[str, str]:
        """Return what is new of the thinking and of the rest.

        What may be the beginning of a tag waits for the next piece.
        """
        text, self._held = self._held + piece, ""
        if self._at_start:
            start = text.lstrip()
            if start and start != THINK and THINK.startswith(start) and not last:
                self._held = text
                return "", ""
            if start.startswith(THINK):
                text, self._opened = start.removeprefix(THINK), True
            self._at_start = not start
        if not self._opened:
            return "", text
        before, end, after = text.partition(THINK_END)
        if end:
            self._opened = False
            return before, after
        sizes = range(len(THINK_END) - 1, 0, -1)
        held = 0 if last else next((n for n in sizes if text.endswith(THINK_END[:n])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], ""


@dataclass(frozen=True)
class Engine:
    """A vLLM server and the model that it has."""

    names: tuple[str, ...]
    socket: Path
    data: Data | None
    """How the run asks; None for a model that no run made."""
    thinks: bool
    """Whether its outputs may have thinking, which the front divides from the answer."""
    opened: bool
    """Whether its outputs begin within the thinking."""
    targets: tuple[int, ...]
    """Lengths that its training asked for; empty: none."""

    @classmethod
    def of(cls, names: tuple[str, ...], folder: Path, socket: Path, spec: RunSpec | None) -> Engine:
        """Read what the front needs of a model directory.

        Args:
            names: of the model, the most exact one last.
            folder: the model directory.
            socket: where vLLM listens.
            spec: of the run that made it.
        """
        files, data = TokenizerFiles.read(folder), None if spec is None else spec.data
        thinking = (data and data.thinking) or (files and thinking_of(files, data)) or "optional"
        opened = files is not None and opens_thinking(files)
        opened |= data is not None and (data.think_prefill or thinking == "required")
        targets = {t for term in (spec.reward if spec else ()) for t in term.targets or ()}
        return cls(names, socket, data, thinking != "none", opened, tuple(sorted(targets)))


class Front:
    """The endpoints.

    Args:
        engines: vLLM's servers; the first one answers for names that no other has.
        token: that requests must bring as a Bearer key; empty: none.
        accounts: whose keys requests must bring instead; None: none.
        day_tokens: tokens of prompts and answers that an account may use a day.
        page: whether there is a page.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        token: str = "",
        accounts: Accounts | None = None,
        day_tokens: int = 0,
        page: bool = False,
    ) -> None:
        self._engines, self._token, self.page = engines, token, page
        self._accounts, self._day_tokens = accounts, day_tokens
        self._open = not token and accounts is None
        self._buckets, self._running = TokenBuckets(), Counter[Hashable]()
        self._hashing = asyncio.Semaphore(2)
        self.ready = False
        """Whether all models are loaded."""

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        routes = [web.get("/health", self._health), web.get("/v1/models", self._models)]
        routes += [web.post(path, self._generate) for path in ("/v1/completions", _CHAT)]
        if self.page:
            routes.append(web.get("/", self._html))
        if self._accounts is not None:
            routes += [web.post(path, self._enter) for path in ("/register", "/login")]
        application.add_routes(routes)
        return application

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if self._open and not names_this_machine(request.host):
            raise web.HTTPForbidden(text="ask for localhost")
        return not_kept(await handler(request))

    async def _admit(self, request: web.Request) -> str:
        """Return the account whose key a request brings; empty without accounts."""
        key, name = request.headers.get("Authorization", "").removeprefix("Bearer ").strip(), ""
        if self._accounts is not None:
            owner = await asyncio.to_thread(self._accounts.owner, key)
            name, allowed = owner or "", owner is not None
        else:
            given = key.encode(errors="surrogateescape")
            allowed = self._open or hmac.compare_digest(given, self._token.encode())
        if not allowed:
            raise web.HTTPUnauthorized(text="a key is needed: Authorization: Bearer KEY")
        if not self.ready:
            raise web.HTTPServiceUnavailable(text="the model is being loaded; try again soon")
        return name

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.ready else 503)

    async def _html(self, request: web.Request) -> web.StreamResponse:
        sides = [
            {"model": e.names[-1], "run": e.data is not None, "targets": e.targets}
            for e in self._engines
        ]
        data = {"sides": sides, "accounts": bool(self._accounts), "day_tokens": self._day_tokens}
        title = html.escape(" and ".join(engine.names[-1] for engine in self._engines))
        scripts, styles = ("text.js", "chat.js"), ("style.css", "chat.css")
        page = html_page(title, json.dumps(data), "'self'", "chat.html", scripts, styles)
        return web.Response(text=page, content_type="text/html")

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        """Answer with a key for a name and a password."""
        assert self._accounts is not None
        if not 0 < (request.content_length or 0) <= MAX_ENTRY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_ENTRY_BYTES, request.content_length or 0)
        body = await _json_body(request)
        name, password = str(body.get("name")), str(body.get("password"))
        forwarded, now = request.headers.getall("X-Forwarded-For", []), time.monotonic()
        for bucket in client_address(request.remote, forwarded, _OWN_MACHINE), ("name", name):
            if self._buckets.wait_s(bucket, (ATTEMPTS - 1) * ATTEMPT_S, now):
                raise web.HTTPTooManyRequests(text="too many attempts; try again in a minute")
            self._buckets.take(bucket, ATTEMPT_S, now)
        work = self._accounts.login if request.path == "/login" else self._accounts.register
        try:
            async with self._hashing:
                key = await asyncio.to_thread(work, name, password)
        except Refused as error:
            raise web.HTTPConflict(text=str(error)) from error
        if key is None:
            raise web.HTTPUnauthorized(text="no such name, or another password")
        return web.json_response({"key": key})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self._admit(request)
        found = []
        for engine in self._engines:
            async with _session(engine) as session, session.get("http://vllm/v1/models") as answer:
                found += (await answer.json())["data"]
        return web.json_response({"object": "list", "data": found})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        name = await self._admit(request)
        if self._accounts is None:
            return await self._pass_on(request, _Reply())
        reply = _Reply()
        with at_once(self._running, {name: AT_ONCE}) as allowed:
            if not allowed:
                raise web.HTTPTooManyRequests(text=f"an account has {AT_ONCE} requests at once")
            if await asyncio.to_thread(self._accounts.spend, name, 0) >= self._day_tokens:
                text = f"the {self._day_tokens} tokens of this day are used up"
                raise web.HTTPTooManyRequests(text=text)
            try:
                return await self._pass_on(request, reply)
            finally:
                spent = asyncio.to_thread(self._accounts.spend, name, reply.tokens)
                await asyncio.shield(spent)

    async def _pass_on(self, request: web.Request, reply: _Reply) -> web.StreamResponse:
        """Let vLLM answer."""
        body = await _json_body(request)
        beside = self._engines[1:]
        engine = next((e for e in beside if body.get("model") in e.names), self._engines[0])
        wrong = _prepare(body, engine) if request.path == _CHAT else None
        wrong = wrong or (_too_much(body) if self._accounts else None)
        if wrong is not None:
            raise web.HTTPBadRequest(text=wrong)
        options = body.get("stream_options")
        reply.wanted = options if isinstance(options, dict) else {}
        kwargs = body.get("chat_template_kwargs")
        told_not = isinstance(kwargs, dict) and kwargs.get("enable_thinking") is False
        reply.divides = request.path == _CHAT and engine.thinks and not told_not
        reply.opened = engine.opened
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with _session(engine) as session:
            try:
                asked = await session.post(f"http://vllm{request.path}", json=body)
            except aiohttp.ClientError as error:
                raise web.HTTPBadGateway(text="vLLM does not answer") from error
            async with asked as answer:  # its end ends the work in vLLM
                if answer.content_type != "text/event-stream":
                    whole = await answer.json()
                    reply.take(whole, "message")
                    return web.json_response(whole, status=answer.status)
                headers = {"Content-Type": "text/event-stream"}
                response = not_kept(web.StreamResponse(headers=headers))
                await response.prepare(request)
                async for line in answer.content:
                    async with asyncio.timeout(SEND_S):
                        await response.write(reply.line(line))
                return response


class _Reply:
    """An answer of vLLM on its way to the client."""

    def __init__(self) -> None:
        self.divides = self.opened = False
        """Whether to divide the thinking from the rest, and whether it is open at the start."""
        self.wanted: Mapping[str, Any] = {}
        """The client's `stream_options`."""
        self._choices: dict[int, Thinking] = {}
        self.tokens = 0
        """Of the prompt and of the answer so far."""

    def take(self, event: dict[str, Any], part: str) -> None:
        """Count tokens, and divide each choice's text; `part` is `message` or `delta`."""
        self.tokens = max(self.tokens, (event.get("usage") or {}).get("total_tokens") or 0)
        for choice in event.get("choices") or () if self.divides else ():
            text, last = choice[part].get("content"), choice.get("finish_reason") is not None
            if choice[part].get("reasoning"):  # vLLM itself divides: --reasoning-parser
                self.divides = False
            if not self.divides or (text is None and not last):
                continue
            thinking = self._choices.setdefault(choice["index"], Thinking(opened=self.opened))
            thought, rest = thinking.take(text or "", last=last)
            choice[part] |= {"content": rest or None}
            if thought:
                choice[part]["reasoning_content"] = thought

    def line(self, line: bytes) -> bytes:
        """Return a line of a stream as the client gets it."""
        if not line.startswith(b"data: {"):
            return line
        event = json.loads(line.removeprefix(b"data: "))
        self.take(event, "delta")
        if not event.get("choices") and "usage" in event and not self.wanted.get("include_usage"):
            return b""
        if event.get("choices") and not self.wanted.get("continuous_usage_stats"):
            event["usage"] = None
        return b"data: " + json.dumps(event).encode() + b"\n"


def _prepare(body: dict[str, Any], engine: Engine) -> str | None:
    """Make a chat request one for vLLM; return what is wrong with it."""
    if engine.thinks:
        body["skip_special_tokens"] = False  # </think> may be one
    if "target" not in body:
        return None
    target = body.pop("target")
    match body.get("messages"):
        case [{"role": "user", "content": str(problem)}] if engine.data is not None:
            if target is None or (type(target) is int and 0 < target < 10**7):
                body["messages"] = engine.data.prompt_messages(problem, target)
                return None
    return "`target`, a number or null, is for a run's version and one message, a user's text"


def _too_much(body: Mapping[str, Any]) -> str | None:
    """Return why an account may not ask this: one request gives one answer, of bounded length."""
    prompt = body.get("prompt", "")
    is_tokens = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    several = any(body.get(field) not in (None, 1) for field in ("n", "best_of"))
    if several or not (is_tokens or isinstance(prompt, str)) or body.get("use_beam_search"):
        return "an account asks for one answer: no `n`, `best_of`, beam search, list of prompts"
    return None


async def _json_body(request: web.Request) -> dict[str, Any]:
    """Return a JSON object that was sent as one; other sites' pages cannot send that type."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send JSON, as application/json")
    try:
        with connection_of(request).receiving():
            async with asyncio.timeout(BODY_S):
                body = json.loads(await request.read())
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text="the body came too slowly") from error
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is no JSON object")
    return body


def _session(engine: Engine) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=ANSWER_S)
    connector = aiohttp.UnixConnector(str(engine.socket))
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_BODY_BYTES)


async def is_up(engine: Engine) -> bool:
    """Return whether a vLLM server answers."""
    try:
        async with asyncio.timeout(5.0), _session(engine) as vllm, vllm.get(_HEALTH) as answer:
            return answer.ok
    except (OSError, aiohttp.ClientError):  # a TimeoutError is an OSError
        return False
