"""Compiled programs survive a restart, for all runs of a user; damage costs a compilation only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache

from learner_jax.compile_cache import UNUSED_DAYS, ProgramCache, cache_folder, keep_compiled
from runspec.core.errors import UserError
from tests.learner_jax.conftest import changed, tiny_spec

PROGRAM = """
import logging, sys
from pathlib import Path
import jax, jax.numpy as jnp
from learner_jax.compile_cache import CompileCounter, keep_compiled
logging.basicConfig()
keep_compiled(Path(sys.argv[1]))
counter = CompileCounter()
print(jax.jit(lambda x: jnp.sin(x @ x).sum())(jnp.eye(3)), counter)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """Runs the program in a process of its own."""
    command, pipe = [sys.executable, "-c", PROGRAM, str(folder)], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """(what it printed, what it logged)."""
    printed, logged = process.communicate()
    assert process.returncode == 0, logged
    return printed, logged


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.slow
def test_two_runs_at_once_share_what_they_compile_and_damage_is_compiled_again(tmp_path):
    # given two first starts at once, which fill the cache
    folder = tmp_path / "compiled"
    both = [end(process) for process in (start(folder), start(folder))]
    value, rest = both[0][0].split(maxsplit=1)
    count = int(rest.split(" programs")[0].split()[-1])
    assert count > 0 and both[1][0].startswith(value + " compiled")
    assert not any("damaged" in logged for _, logged in both)
    # when entries are damaged, then it says so and compiles those, and takes the others from there
    entries = list(folder.glob("*.program"))
    assert len(entries) == count > 3
    for damage, entry in zip(
        (flip, lambda data: data[:9], lambda data: b""), entries, strict=False
    ):
        entry.write_bytes(damage(entry.read_bytes()))
    printed, logged = end(start(folder))
    assert printed.startswith(value + " compiled")
    assert f"{count - 3} of {count} programs" in printed
    assert logged.count("damaged, compiling it again") == 3
    # and the start after that takes all of them from there again
    assert f"{count} of {count} programs" in end(start(folder))[0]


@pytest.fixture
def own_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's JAX as it is."""
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(compilation_cache, "_cache", None)


@pytest.mark.usefixtures("own_jax")
def test_what_nobody_used_for_a_month_is_removed(tmp_path):
    cache = ProgramCache(tmp_path)
    for name in ("old", "used"):
        cache.put(name, b"program")
        past = time.time() - (UNUSED_DAYS + 1) * 86400
        os.utime(tmp_path / f"{name}.program", (past, past))
    cache.get("used")
    keep_compiled(tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == ["used"]


def test_the_cache_is_the_users_own_or_where_the_spec_says(tmp_path, monkeypatch):
    spec = tiny_spec()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(spec) == tmp_path / "runspec" / "compiled"
    elsewhere = changed(spec, learner={"compile_cache": "/elsewhere"})
    assert cache_folder(elsewhere) == Path("/elsewhere")


@pytest.mark.usefixtures("own_jax")
def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no folder for compiled programs") as caught:
        keep_compiled(tmp_path / "file" / "compiled")
    assert caught.value.place.endswith("file/compiled")
    folder = tmp_path / "shared"
    keep_compiled(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(UserError, match="others may write compiled programs here"):
            keep_compiled(folder)
