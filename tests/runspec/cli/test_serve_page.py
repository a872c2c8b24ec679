"""The front of `runspec serve`, its page in a real browser, and accounts, before a fake vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from subprocess import CompletedProcess
from typing import Any

import httpx
import pytest
from aiohttp import web

from runspec.core.connection_limits import Observer, answering
from runspec.core.http_server import serving
from runspec.local import chat
from runspec.local.chat import LIMITS, Engine, Front, Thinking
from runspec.local.identity import ACCOUNTS_FILE, Accounts
from tests.runspec.cli.in_process import runspec
from tests.runspec.cli.published import publish_run
from tests.runspec.local.dashboard.test_browser import chrome  # noqa: F401 - a fixture
from tests.runspec.local.fake_run import small_spec
from tests.waiting import eventually

RUN = "small"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
ANSWERS = {
    "sum": ["7+", "8</thi", "nk>", "15"],
    "hostile": [HOSTILE, "\u202egnp", "</think>", HOSTILE, "\u2066</think>\x1b[31m"],
}
"""Tokens of an answer by the question; to any other one there is no end of tokens."""
DATA = small_spec(RUN, 5).data
PASSWORD = "correct horse battery"


class FakeVllm:
    """Answers as vLLM's server does, at a Unix socket; what it is asked is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.version, self.left = 1, threading.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        if request.path == MODELS:
            return web.json_response({"data": [{"id": f"{RUN}@v{self.version}"}]})
        tokens = ANSWERS.get(body["messages"][-1]["content"].partition("\n")[0])
        if not body.get("stream"):
            return web.json_response(self._event("".join(tokens or ()), 4, "stop", "message"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            for n in range(10**6 if tokens is None else len(tokens) + 1):
                last = tokens is not None and n == len(tokens)
                text = "" if last else f"more{n} " if tokens is None else tokens[n]
                event = self._event(text, n + (not last), "stop" if last else None, "delta")
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                await asyncio.sleep(0.01 if tokens is None else 0.0)
            event = {**self._event("", len(tokens or ()), None, "delta"), "choices": []}
            await response.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        finally:
            self.left.set()
        return response

    def _event(self, text: str, tokens: int, end: str | None, part: str) -> dict[str, Any]:
        usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
        choice = {"index": 0, part: {"role": "assistant", "content": text}, "finish_reason": end}
        return {"model": f"{RUN}@v{self.version}", "choices": [choice], "usage": usage}


@contextmanager
def fronted(names: Sequence[str] = (RUN,), **how: Any) -> Iterator[tuple[str, FakeVllm]]:
    """URL of a front before a fake vLLM that has these models."""
    fake, ports, loop, stop = FakeVllm(), Queue[int](), asyncio.new_event_loop(), asyncio.Event()

    async def run(at: Path) -> None:
        inner = web.Application()
        inner.router.add_route("*", "/{path:.*}", fake.answer)
        runner = web.AppRunner(inner, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(at)).start()
        engines = [Engine((name,), at, DATA, True, True, (8, 32)) for name in names]
        front = Front(engines, page=True, **how)
        front.ready = True
        application = front.application()
        application.middlewares.insert(0, answering)
        log = logging.getLogger("test")
        async with serving(application, ("127.0.0.1", 0), LIMITS, Observer(), log) as (port, _):
            ports.put(port)
            await stop.wait()
        await runner.cleanup()

    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=loop.run_until_complete, args=[run(Path(folder) / "v")])
        thread.start()
        try:
            yield f"http://127.0.0.1:{ports.get()}", fake
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def ask(url: str, question: str, key: str = "", **more: Any) -> httpx.Response:
    body = {"model": RUN, "messages": [{"role": "user", "content": question}], **more}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + CHAT, json=body, headers=headers, timeout=60.0)


def deltas(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("opened", "pieces", "thought", "rest"),
    [
        (True, ["a</th", "ink>b</think>c"], "a", "b</think>c"),
        (True, ["<thi", "nk>a </t", "he end"], "a </the end", ""),
        (False, ["\n<think>a", "</think>b"], "a", "b"),
        (False, ["a</think>", "b"], "", "a</think>b"),
        (False, ["<", "a"], "", "<a"),
    ],
)
def test_the_thinking_ends_once_wherever_the_pieces_are_cut(opened, pieces, thought, rest):
    thinking = Thinking(opened=opened)
    found = [thinking.take(each, last=False) for each in pieces] + [thinking.take("", last=True)]
    assert ["".join(each) for each in zip(*found, strict=True)] == [thought, rest]


def test_the_thinking_is_apart_and_the_run_asks_as_in_training():
    with fronted() as (url, fake):
        whole = ask(url, "sum", target=24).json()["choices"][0]["message"]
        assert (whole["reasoning_content"], whole["content"]) == ("7+8", "15")
        # the front has vLLM print </think>, which may be a special token
        [(_, asked)] = fake.asked
        assert asked["messages"] == DATA.prompt_messages("sum", 24)
        assert asked["skip_special_tokens"] is False and "target" not in asked
        # in a stream too, in which usage is for those who asked for it
        events = deltas(ask(url, "sum", stream=True))
        parts = [event["choices"][0]["delta"] for event in events]
        assert "".join(part.get("reasoning_content") or "" for part in parts) == "7+8"
        assert "".join(part.get("content") or "" for part in parts) == "15"
        assert {str(event["usage"]) for event in events} == {"None"}
        wanted = {"include_usage": True}
        assert deltas(ask(url, "sum", stream=True, stream_options=wanted))[-1]["usage"]
        assert ask(url, "sum", target=True).status_code == 400
        assert ask(url, "sum", target=8, messages=[]).status_code == 400


def test_only_the_allow_list_reaches_vllm():
    changing = ["scale_elastic_ep", "v1/load_lora_adapter", "v1/unload_lora_adapter", "sleep"]
    changing += ["collective_rpc", "pause", "update_weights", "invocations", "start_profile"]
    changing += ["tokenize", "inference/v1/generate", "v1/responses", "reset_prefix_cache"]
    with fronted() as (url, fake):
        for path in (*changing, "v1/chat/completions/render", "v1/../sleep", "%2e%2e/sleep"):
            assert httpx.post(f"{url}/{path}", json={}).status_code == 404
        # nor what another site's page can send, or a name that leads here
        assert httpx.post(url + CHAT, content="{}").status_code == 415
        assert httpx.options(url + CHAT).status_code == 405
        for path in ("/", MODELS):
            assert httpx.get(url + path, headers={"Host": "evil.example"}).status_code == 403
        assert fake.asked == []
        assert httpx.get(url + MODELS).json()["data"] == [{"id": f"{RUN}@v1"}]


def test_beyond_this_machine_a_key_is_needed():
    with fronted(token="s3cret") as (url, fake):
        codes = [ask(url, "sum", key).status_code for key in ("", "other", "s3cret")]
        assert codes == [401, 401, 200]
        assert len(fake.asked) == 1
        assert httpx.get(url).status_code == 200


def test_accounts_have_keys_and_limits_and_end(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "ATTEMPT_S", 1e6)  # ten attempts, and no further one
    (run_dir := tmp_path / RUN).mkdir()
    accounts = Accounts(run_dir / ACCOUNTS_FILE)
    assert (run_dir / ACCOUNTS_FILE).stat().st_mode & 0o777 == 0o600
    with fronted(accounts=accounts, day_tokens=20) as (url, _):

        def enter(how: str, name: Any = "ada", password: Any = PASSWORD) -> httpx.Response:
            return httpx.post(f"{url}/{how}", json={"name": name, "password": password})

        key = enter("register").json()["key"]
        assert enter("register", "ada").status_code == 409
        assert enter("register", "\u0430da").status_code == enter("register", "x" * 40).status_code
        assert enter("register", "short", "pass").status_code == 409
        # a wrong password tells as little as a wrong name
        wrong = [enter("login", "ada", PASSWORD + "."), enter("login", "bob")]
        assert {(each.status_code, each.text) for each in wrong} == {(401, wrong[0].text)}
        again = enter("login").json()["key"]
        # when the tokens of the day are used up, then there is no more for either key
        assert [ask(url, "sum", each).status_code for each in (key, again, key)] == [200, 200, 429]
        assert ask(url, "sum", "no-key").status_code == 401
        bob = enter("register", "bob").json()["key"]
        assert ask(url, "sum", bob, n=8).status_code == 400
        # when the operator ends an account, then its keys and its password are of no use
        accounts.revoke("bob")
        gone = enter("login", "bob")
        assert ask(url, "sum", bob).status_code == 401
        assert (gone.status_code, gone.text) == (401, wrong[0].text)
        assert [tokens for *_, tokens in accounts.all()] == [28, 0]
        # and whoever guesses on has to wait
        assert enter("login", "eve").status_code == 429
    # and nothing in the file is a key or a password
    stored = (run_dir / ACCOUNTS_FILE).read_bytes()
    assert not any(secret.encode() in stored for secret in (key, again, bob, PASSWORD))


@pytest.mark.slow
def test_the_page_folds_thinking_stops_copies_and_follows(chrome) -> None:  # noqa: F811
    def text(selector: str) -> str:
        found = chrome.find_elements("css selector", selector)
        return found[-1].get_property("textContent") if found else ""

    def send(question: str) -> None:
        chrome.find_element("id", "question").send_keys(question + "\n")

    with fronted() as (url, fake):
        chrome.get(url)
        slider = "const s = document.getElementById('target'); s.value = 24;"
        chrome.execute_script(f"{slider} s.dispatchEvent(new Event('input'))")
        send("sum")
        eventually(lambda: "24 were asked for" in text(".card p"), "the answer", poll_s=0.1)
        assert fake.asked[-1][1]["messages"] == DATA.prompt_messages("sum", 24)
        # then the thinking is folded and counted
        assert (text("details pre"), text(".answer")) == ("7+8", "15")
        assert text("summary") == "Thinking, 2 tokens"
        assert chrome.find_element("css selector", "details").get_property("open") is False
        # when a model answers hostile text, then it is text
        send("hostile")
        eventually(lambda: "5 tokens" in text(".card p"), "hostile text", poll_s=0.1)
        assert text("details pre") == HOSTILE + "⟨U+202E⟩gnp"
        assert text(".answer") == HOSTILE + "⟨U+2066⟩</think>⟨U+001B⟩[31m"
        assert chrome.title == RUN and not chrome.find_elements("css selector", "#talk img")
        # and what is copied is what is shown
        allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        chrome.execute_cdp_cmd("Browser.grantPermissions", allowed)
        chrome.find_elements("css selector", ".card button")[-1].click()
        eventually(lambda: text(".card button") == "Copied", "the copy", poll_s=0.1)
        read = "navigator.clipboard.readText().then(arguments[0])"
        assert chrome.execute_async_script(read) == text(".answer")
        # when an answer has no end, then it comes piece by piece, of the newest version, until Stop
        fake.version, fake.left = 2, threading.Event()
        send("endless")
        eventually(lambda: "more3" in text("details pre"), "pieces", poll_s=0.1)
        assert text(".card b") == f"{RUN}@v2"
        chrome.find_element("id", "stop").click()
        eventually(fake.left.is_set, "vLLM is told to stop", poll_s=0.1)
        eventually(lambda: "stopped" in text(".card p"), "the page says so", poll_s=0.1)
        assert chrome.get_log("browser") == []


@pytest.mark.slow
def test_two_versions_answer_side_by_side_for_whoever_has_the_link(chrome) -> None:  # noqa: F811
    buttons = partial(chrome.find_elements, "css selector", ".card button")
    with fronted((RUN, f"{RUN}@v0"), token="s3cret") as (url, fake):
        for link in (url, f"{url}/#token=s3cret"):
            chrome.get("about:blank")
            chrome.get(link)
            chrome.find_element("id", "question").send_keys("sum\n")
            eventually(lambda: len(buttons()) == 2, "both answers", poll_s=0.1)
            refused = "a key is needed" in chrome.find_element("id", "trouble").text
            assert refused == (link == url)
        assert sorted(body["model"] for _, body in fake.asked) == [RUN, f"{RUN}@v0"]


@pytest.mark.slow
def test_the_page_registers_and_a_revoked_account_is_out(chrome, tmp_path) -> None:  # noqa: F811
    accounts, field = Accounts(tmp_path / ACCOUNTS_FILE), partial(chrome.find_element, "id")
    with fronted(accounts=accounts, day_tokens=1000) as (url, _):
        chrome.get(url)
        assert not field("ask").is_displayed()
        field("user").send_keys("ada")
        field("password").send_keys(PASSWORD)
        field("register").click()
        eventually(field("ask").is_displayed, "registered", poll_s=0.1)
        field("question").send_keys("sum\n")
        eventually(lambda: "4 tokens" in field("talk").text, "the answer", poll_s=0.1)
        accounts.revoke("ada")
        field("question").send_keys("sum\n")
        eventually(lambda: "a key is needed" in field("trouble").text, "logged out", poll_s=0.1)
        field("password").send_keys(PASSWORD + "\n")
        eventually(lambda: "no such name" in field("trouble").text, "no login", poll_s=0.1)


def test_the_operator_lists_and_revokes(tmp_path):
    run_dir = publish_run(tmp_path, 1)
    (accounts := Accounts(run_dir / ACCOUNTS_FILE)).register("ada", PASSWORD)
    accounts.spend("ada", 1500)

    def serve(*words: str) -> CompletedProcess[str]:
        return runspec("serve", RUN, "--runs-dir", run_dir.parent, *words)

    assert serve("--revoke", "ada").returncode == 0
    assert serve("--accounts").stdout.split() == ["ada", "revoked", "1,500", "tokens", "today"]
    assert "no account 'bob'" in serve("--revoke", "bob").stderr
