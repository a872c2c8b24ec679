"""The middleware that moves vLLM's server to other versions, on an application that vLLM is not."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, make_dataclass
from types import SimpleNamespace

import pytest

from runspec.core.process import FOLLOW_VARIABLE, Move, Reply, Settings, encode
from sampler.engine import version_switch
from sampler.engine.version_switch import VersionSwitch

WAIT_S = 600.0
QUESTION = {"type": "http.request", "body": b"question"}
BEGUN = {**QUESTION, "more_body": True}
Name = make_dataclass("Name", ["name"])


class FakeVllm:
    """Answers a request with the name of its model once `go` is set; its engine notes the calls,
    and finds the tensors in `different` to differ."""

    def __init__(self):
        self.calls, self.different, self.go, self.asked = [], [], asyncio.Event(), 0
        names = [Name("small"), Name("small@v1")]
        registry = SimpleNamespace(base_model_paths=names)
        self.models = SimpleNamespace(base_model_paths=names, registry=registry)
        self.state = SimpleNamespace(
            engine_client=self,
            openai_serving_models=self.models,
            args=SimpleNamespace(model="first"),
        )

    async def pause_generation(self, mode, clear_cache):
        self.calls.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self):
        self.calls.append("resume")

    async def collective_rpc(self, method, kwargs=None):
        self.calls.append(" ".join([method, *(kwargs or {}).values()]))
        return [{"compared": [], "repacked": [], "different": self.different}]

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await asyncio.Event().wait()
        if scope["method"] == "POST":
            self.asked += 1
            assert (await receive())["body"] == b"question"
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.models.base_model_paths[0].name})


class Site:
    """The middleware around `FakeVllm`, and the command's end of the socket."""

    def __init__(self, hold_s, monkeypatch):
        self.ours, servers = socket.socketpair()
        settings = Settings(servers.detach(), "small", 1, hold_s)
        monkeypatch.setenv(FOLLOW_VARIABLE, json.dumps(asdict(settings)))
        self.vllm = FakeVllm()
        self.switch = VersionSwitch(self.vllm)
        scope = {"type": "lifespan", "app": SimpleNamespace(state=self.vllm.state)}
        self.lifespan = asyncio.create_task(self.switch(scope, None, None))
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.ended.set)

    async def open(self):
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.ours)
        assert await self.reply() == Reply(1)

    async def close(self):
        self.lifespan.cancel()
        with suppress(asyncio.CancelledError):
            await self.lifespan
        self.writer.close()

    def ask(self, *pieces, method="POST", reads=True):
        """A request that arrives in pieces: its task, which returns what was sent. A client that
        does not read takes nothing."""
        left, messages = list(pieces or (QUESTION,)), []

        async def receive():
            return left.pop(0) if left else await asyncio.Event().wait()

        async def send(message):
            if not reads:
                await asyncio.Event().wait()
            messages.append(message)

        async def answered():
            await self.switch({"type": "http", "method": method}, receive, send)
            return messages[-1]["body"] if messages else None

        return asyncio.create_task(answered())

    def move(self):
        self.writer.write(encode(Move(2, "second")))

    async def reply(self):
        return Reply(**json.loads(await self.reader.readline()))

    async def under_way(self, requests=1):
        while self.vllm.asked < requests:
            await asyncio.sleep(0)


@pytest.fixture
async def here(monkeypatch, request):
    site = Site(getattr(request, "param", WAIT_S), monkeypatch)
    await site.open()
    yield site
    await site.close()


async def test_those_under_way_end_first_and_those_that_wait_get_the_new_version(here):
    # given a request under way when a move begins
    before = here.ask()
    await here.under_way()
    here.move()
    while here.switch._opened.is_set():
        await asyncio.sleep(0)
    # when another request comes
    after = here.ask()
    # then it waits, unlike one that only reads, and the weights stay
    assert await here.ask(method="GET") == "small@v1"
    assert here.vllm.asked == 1
    assert here.vllm.calls == ["compare_weights first"]
    # until the first one has ended, under the old version
    here.vllm.go.set()
    assert await before == "small@v1"
    assert await here.reply() == Reply(2)
    assert await after == "small@v2"
    loading = ["reload_weights second", "repack_tied_head", "compare_weights second"]
    assert here.vllm.calls[1:] == ["pause wait True", *loading, "resume"]
    names = [each.name for each in here.vllm.models.registry.base_model_paths]
    assert names == ["small@v2", "small"]


@pytest.mark.parametrize("here", [0.05], indirect=True)
async def test_a_request_that_takes_too_long_postpones_the_move(here):
    before = here.ask()
    await here.under_way()
    here.move()
    assert await here.reply() == Reply(1, running=1)
    # requests go on as before, and the next move may succeed
    after = here.ask()
    here.vllm.go.set()
    assert (await before, await after) == ("small@v1", "small@v1")
    here.move()
    assert await here.reply() == Reply(2)


async def test_other_weights_than_the_files_are_never_served(here):
    here.vllm.different = ["model.norm.weight"]
    here.move()
    reply = await here.reply()
    assert reply.version == 1 and "model.norm.weight" in reply.error
    # it answers nothing any more, and ends
    here.vllm.go.set()
    after = here.ask()
    await here.ended.wait()
    assert here.vllm.asked == 0
    after.cancel()


async def test_the_server_ends_with_the_command(here):
    here.move()
    here.writer.close()  # its reply is not read: a reset for the server
    await here.ended.wait()


async def test_a_body_has_a_limit_and_a_deadline(here, monkeypatch):
    monkeypatch.setattr(version_switch, "MAX_BODY_BYTES", 8)
    large = json.loads(await here.ask(BEGUN, {**BEGUN, "body": b"!"}))
    with monkeypatch.context() as patch:
        patch.setattr(version_switch, "BODY_S", 0.01)
        late = json.loads(await here.ask(BEGUN))
    assert [answer["error"]["code"] for answer in (large, late)] == [413, 408]
    assert await here.ask(BEGUN, {"type": "http.disconnect"}) is None
    assert here.vllm.asked == 0
    # what comes in two pieces is one question
    here.vllm.go.set()
    assert await here.ask({**BEGUN, "body": b"ques"}, {**QUESTION, "body": b"tion"}) == "small@v1"


async def test_a_client_that_does_not_read_delays_no_move_for_long(here, monkeypatch):
    monkeypatch.setattr(version_switch, "SEND_S", 0.05)
    here.vllm.go.set()
    stuck = here.ask(reads=False)
    await here.under_way()
    here.move()
    assert await here.reply() == Reply(2)
    with pytest.raises(TimeoutError):
        await stuck
