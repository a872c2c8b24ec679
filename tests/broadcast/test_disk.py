"""Disk work beside an event loop: it can be ended, and is waited for."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from broadcast.disk import Patience, allocated, copy_file, in_thread
from runspec.core.errors import UserError


def forever() -> Patience:
    return Patience(time.monotonic() + 60)


def test_a_copy_has_the_same_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    (tmp_path / "old").write_bytes(data)
    (tmp_path / "new").write_bytes(data * 2)  # longer, of an attempt before

    copy_file(tmp_path / "old", tmp_path / "new", forever())

    assert (tmp_path / "new").read_bytes() == data


def test_work_ends_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x")

    with pytest.raises(UserError, match=r"the time was up while copying .*old"):
        copy_file(tmp_path / "old", tmp_path / "new", Patience(time.monotonic() - 1))


def test_holes_take_no_room(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(10**9)

    assert allocated(tmp_path / "holes") < 10**6
    assert allocated(tmp_path / "missing") == 0


async def test_cancelled_work_is_ended_and_waited_for() -> None:
    # given work in a thread that looks at its patience now and then
    patience, working, look = forever(), threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        working.set()
        look.wait(20)
        try:
            patience.check("working", Path("here"))
        except UserError as error:
            ended.append(str(error))

    running = asyncio.create_task(in_thread(work, patience))
    await asyncio.to_thread(working.wait, 20)

    # when it is cancelled, twice, then nobody is told so before the thread is done
    for _ in range(2):
        running.cancel()
        assert not (await asyncio.wait([running], timeout=0.01))[0]
    look.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(ended) == 1 and "here: the time was up while working" in ended[0]
