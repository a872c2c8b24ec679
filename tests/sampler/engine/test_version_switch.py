"""The middleware that moves vLLM's server to other versions, on an application that vLLM is not."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from runspec.core.follow_protocol import VARIABLE, Move, Reply, Settings, encode
from sampler.engine import version_switch
from sampler.engine.version_switch import VersionSwitch

DEADLINE_S = 20.0


@dataclass
class Name:
    name: str


class FakeEngine:
    """Notes the calls; `different` are the tensors that a comparison finds to differ."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.different: list[str] = []

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        self.calls.append(" ".join([method, *(kwargs or {}).values()]))
        return [{"compared": [], "repacked": [], "different": self.different}]


class FakeVllm:
    """Answers a request with the name of its model once `go` is set."""

    def __init__(self) -> None:
        self.engine, self.go, self.asked = FakeEngine(), asyncio.Event(), 0
        names = [Name("small"), Name("small@v1")]
        self.models = SimpleNamespace(
            base_model_paths=names, registry=SimpleNamespace(base_model_paths=names)
        )
        self.state = SimpleNamespace(
            engine_client=self.engine,
            openai_serving_models=self.models,
            args=SimpleNamespace(model="first"),
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await asyncio.Event().wait()
        if scope["method"] == "POST":
            self.asked += 1
            assert (await receive())["body"] == b"question"
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.models.base_model_paths[0].name})


@dataclass
class Asked:
    """A request; its answer is in `messages`."""

    task: asyncio.Task[None]
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def body(self) -> Any:
        await asyncio.wait_for(self.task, DEADLINE_S)
        return self.messages[-1]["body"]


class Site:
    """The middleware around `FakeVllm`, and the command's end of the socket."""

    def __init__(self, switch: VersionSwitch, vllm: FakeVllm) -> None:
        self.switch, self.vllm = switch, vllm
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    def ask(self, *pieces: dict[str, Any], method: str = "POST", reads: bool = True) -> Asked:
        """A request that arrives in pieces; a client that does not read takes nothing."""
        left = list(pieces or ({"type": "http.request", "body": b"question"},))

        async def receive() -> Any:
            return left.pop(0) if left else await asyncio.Event().wait()

        async def send(message: dict[str, Any]) -> None:
            if not reads:
                await asyncio.Event().wait()
            asked.messages.append(message)

        scope = {"type": "http", "method": method}
        asked = Asked(asyncio.create_task(self.switch(scope, receive, send)))
        return asked

    def move(self) -> None:
        self.writer.write(encode(Move(2, "second")))

    async def reply(self) -> Reply:
        return Reply(**json.loads(await asyncio.wait_for(self.reader.readline(), DEADLINE_S)))


@asynccontextmanager
async def site(
    monkeypatch: pytest.MonkeyPatch, hold_s: float = DEADLINE_S, *different: str
) -> AsyncIterator[Site]:
    ours, servers = socket.socketpair()
    settings = Settings(servers.detach(), "small", 1, hold_s)
    monkeypatch.setenv(VARIABLE, json.dumps(asdict(settings)))
    vllm = FakeVllm()
    vllm.engine.different = list(different)
    made = Site(VersionSwitch(vllm), vllm)
    scope = {"type": "lifespan", "app": SimpleNamespace(state=vllm.state)}
    lifespan = asyncio.create_task(made.switch(scope, None, None))  # type: ignore[arg-type]
    made.reader, made.writer = await asyncio.open_unix_connection(sock=ours)
    try:
        yield made
    finally:
        lifespan.cancel()
        with suppress(asyncio.CancelledError):
            await lifespan
        made.writer.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_those_under_way_end_first_and_those_that_wait_get_the_new_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(monkeypatch) as here:
        assert await here.reply() == Reply(1)
        # given a request under way when a move begins
        before = here.ask()
        await until(lambda: here.vllm.asked == 1)
        here.move()
        await until(lambda: not here.switch._gate._opened.is_set())
        # when another request comes
        after = here.ask()
        # then it waits, unlike one that only reads, and the weights stay
        assert await here.ask(method="GET").body() == "small@v1"
        assert here.vllm.asked == 1
        assert here.vllm.engine.calls == ["compare_weights first"]
        # until the first one has ended, under the old version
        here.vllm.go.set()
        assert await before.body() == "small@v1"
        assert await here.reply() == Reply(2)
        assert await after.body() == "small@v2"
        assert here.vllm.engine.calls[1:] == [
            "pause wait True",
            "reload_weights second",
            "repack_tied_head",
            "compare_weights second",
            "resume",
        ]
        assert [each.name for each in here.vllm.models.registry.base_model_paths] == [
            "small@v2",
            "small",
        ]


async def test_a_request_that_takes_too_long_postpones_the_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(monkeypatch, 0.05) as here:
        assert await here.reply() == Reply(1)
        before = here.ask()
        await until(lambda: here.vllm.asked == 1)
        here.move()
        assert await here.reply() == Reply(1, running=1)
        # requests go on as before, and the next move may succeed
        after = here.ask()
        here.vllm.go.set()
        assert (await before.body(), await after.body()) == ("small@v1", "small@v1")
        here.move()
        assert await here.reply() == Reply(2)


async def test_other_weights_than_the_files_are_never_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with site(monkeypatch) as here:
        assert await here.reply() == Reply(1)
        here.vllm.engine.different = ["model.norm.weight"]
        here.move()
        reply = await here.reply()
        assert reply.version == 1 and "model.norm.weight" in reply.error
        # it answers nothing any more, and ends
        here.vllm.go.set()
        after = here.ask()
        await asyncio.wait_for(ended.wait(), DEADLINE_S)
        assert here.vllm.asked == 0
        after.task.cancel()


async def test_the_server_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with site(monkeypatch) as here:
        here.writer.close()  # its reply was not read: a reset for the server
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def test_a_body_has_a_limit_and_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_switch, "MAX_BODY_BYTES", 8)
    monkeypatch.setattr(version_switch, "BODY_S", 0.05)
    async with site(monkeypatch) as here:
        await here.reply()
        begun = {"type": "http.request", "body": b"question", "more_body": True}
        large = json.loads(await here.ask(begun, {**begun, "body": b"!"}).body())
        late = json.loads(await here.ask(begun).body())
        assert [answer["error"]["code"] for answer in (large, late)] == [413, 408]
        gone = here.ask(begun, {"type": "http.disconnect"})
        await asyncio.wait_for(gone.task, DEADLINE_S)
        assert gone.messages == [] and here.vllm.asked == 0
        # what comes in two pieces is one question
        here.vllm.go.set()
        pieces = ({**begun, "body": b"ques"}, {"type": "http.request", "body": b"tion"})
        assert await here.ask(*pieces).body() == "small@v1"


async def test_a_client_that_does_not_read_delays_no_move_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(version_switch, "SEND_S", 0.05)
    async with site(monkeypatch) as here:
        await here.reply()
        here.vllm.go.set()
        stuck = here.ask(reads=False)
        await until(lambda: here.vllm.asked == 1)
        here.move()
        assert await here.reply() == Reply(2)
        with pytest.raises(TimeoutError):
            await stuck.task
