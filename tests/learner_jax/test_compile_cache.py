"""Compiled programs survive a restart; damage to them costs a compilation and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from learner_jax.compile_cache import DIGESTS_NAME, cache_folder, keep_compiled
from runspec.core.errors import UserError
from tests.learner_jax.conftest import tiny_spec

PROGRAM = """
import logging, sys
from pathlib import Path
import jax, jax.numpy as jnp
from learner_jax.compile_cache import CompileCounter, keep_compiled, note_compiled
logging.basicConfig()
keep_compiled(Path(sys.argv[1]))
counter = CompileCounter()
print(jax.jit(lambda x: jnp.sin(x @ x).sum())(jnp.eye(3)), counter)
if "killed" not in sys.argv:
    note_compiled(Path(sys.argv[1]))
"""


def restart(folder: Path, *how: str) -> tuple[str, str]:
    """Runs the program in a process of its own; (what it printed, what it logged)."""
    command = [sys.executable, "-c", PROGRAM, str(folder), *how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, done.stderr


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def cut_off(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.slow
def test_a_restart_compiles_nothing_again_unless_the_cache_is_damaged(tmp_path: Path) -> None:
    # given a first start, which fills the cache
    folder = tmp_path / "compiled"
    first, _ = restart(folder)
    value, rest = first.split(maxsplit=1)
    count = int(rest.split(" programs")[0].split()[-1])
    assert f"0 of {count} programs" in first and count > 0
    # when it starts again, then every program comes from there
    assert f"{count} of {count} programs" in restart(folder)[0]
    for damage in (flip, cut_off):
        # and when every entry is damaged, it says so and compiles them
        entries = list(folder.glob("*-cache"))
        assert len(entries) == count
        for entry in entries:
            entry.write_bytes(damage(entry.read_bytes()))
        again, log = restart(folder)
        assert again.startswith(value + " compiled") and f"0 of {count} programs" in again
        assert log.count("damaged, compiling it again") == count
        # and the start after that takes them from there again
        assert f"{count} of {count} programs" in restart(folder)[0]


@pytest.mark.slow
def test_what_a_killed_start_wrote_is_compiled_again(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    restart(folder, "killed")
    assert ", 0 of " in restart(folder)[0]
    # nor is anything taken whose digests cannot be read
    (folder / DIGESTS_NAME).write_bytes(b"{")
    printed, log = restart(folder)
    assert ", 0 of " in printed and "compiling everything" in log


def test_the_cache_lies_in_the_run_directory_or_where_the_spec_says(tmp_path: Path) -> None:
    spec = tiny_spec()
    assert cache_folder(tmp_path, spec) == tmp_path / "compiled"
    learner = spec.learner.model_copy(update={"compile_cache": "/elsewhere"})
    elsewhere = spec.model_copy(update={"learner": learner})
    assert cache_folder(tmp_path, elsewhere) == Path("/elsewhere")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no folder for compiled programs") as caught:
        keep_compiled(tmp_path / "file" / "compiled")
    assert caught.value.place.endswith("file/compiled")
