"""Who may read a page: this machine, or whoever has the token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from runspec.local.dashboard.server import TOKEN, Dashboard, is_loopback
from runspec.local.dashboard.source import FolderSource
from runspec.local.dashboard.view import RunView
from tests.runspec.local.dashboard.made_run import MadeRun


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    run = MadeRun(tmp_path)
    run.add_steps(1)
    view = RunView(FolderSource(run.dir))
    view.refresh(60.0)
    return view


async def serving(view: RunView, token: str | None) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(Dashboard([view], token).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    async with ClientSession() as session:
        yield session


async def status(session: ClientSession, url: str, headers: dict[str, str] | None = None) -> int:
    async with session.get(url, headers=headers) as answer:
        return answer.status


PATHS = ("/api/0", "/api/0/search?q=out", "/api/0/rollout/0")


async def test_elsewhere_a_token_is_needed(view: RunView, session: ClientSession) -> None:
    runner, url = await serving(view, "secret")
    try:
        for path in PATHS:
            assert await status(session, url + path) == 401
            assert await status(session, url + path, {TOKEN: "secret2"}) == 401
            assert await status(session, url + path, {TOKEN: "secret"}) == 200
        # the page itself holds no data
        async with session.get(url) as answer:
            assert answer.status == 200 and "out 0-0-0" not in await answer.text()
            assert answer.headers["Referrer-Policy"] == "no-referrer"
    finally:
        await runner.cleanup()


async def test_another_sites_page_cannot_read_on_loopback(
    view: RunView, session: ClientSession
) -> None:
    # given a page of a name that leads to this machine
    runner, url = await serving(view, None)
    try:
        for path in PATHS:
            assert await status(session, url + path) == 200
            assert await status(session, url + path, {"Host": "evil.example:80"}) == 403
            assert await status(session, url + path, {"Host": "localhost:1"}) == 200
    finally:
        await runner.cleanup()


async def test_what_is_not_there_is_not_found(view: RunView, session: ClientSession) -> None:
    runner, url = await serving(view, None)
    try:
        for path in ("/api/1", "/api/0/rollout/99", "/api/0/rollout/x", "/../etc/passwd"):
            assert await status(session, url + path) == 404
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_is_known(host: str, here: bool) -> None:
    assert is_loopback(host) is here
