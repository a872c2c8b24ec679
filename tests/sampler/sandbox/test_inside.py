"""The launcher's side on kernels that this machine has not: older Landlock, no list of children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sampler.sandbox import Limits, probe, run
from sampler.sandbox import process as parent_side
from sampler.sandbox.inside import limits, watchdog
from sampler.sandbox.limits import Finished
from sampler.sandbox.process import SET_B

SANDBOX = Path(parent_side.__file__).parent
LIMITS = Limits(wall_s=30.0, processes=8)


def plain(source: str, *arguments: str) -> str:
    """What a program that can import `inside` prints, not isolated."""
    head = f"import sys; sys.path.insert(0, {str(SANDBOX)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", head + source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_launcher_imports_nothing_that_takes_its_time() -> None:
    loaded = set(plain("import inside.launcher; print(*sys.modules)").split())
    assert "inside.init_process" in loaded
    assert not loaded & {"re", "json", "typing", "dataclasses", "enum", "pathlib", "subprocess"}


@pytest.mark.parametrize("abi", range(1, 7))
def test_landlock_holds_with_the_rights_of_an_older_kernel(abi: int, tmp_path: Path) -> None:
    if limits.landlock_abi() < abi:
        pytest.skip(f"Landlock's ABI {abi} is not here")
    for name in ("readable", "writable", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    source = f"""
import os
from inside import kernel, limits
limits.landlock_abi = lambda: {abi}
kernel.prctl("", kernel.PR_SET_NO_NEW_PRIVS, 1)
top = sys.argv[1].encode()
limits.restrict_files([top + b"/readable"], [top + b"/writable"], [b"/dev/null"])
for name in ("readable", "writable", "outside"):
    for mode in ("r", "a", "x"):
        path = os.path.join(sys.argv[1], name, "new" if mode == "x" else "file")
        try: open(path, mode)
        except PermissionError: continue
        print(name, mode)
"""
    done = plain(source, str(tmp_path)).split("\n")
    assert done[:-1] == ["readable r", "writable r", "writable a", "writable x"]


def test_where_landlock_does_not_scope_signals_the_filter_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not set(SET_B) <= set(probe().working):
        pytest.skip("set B is not available here")
    monkeypatch.setattr(parent_side, "landlock_abi", lambda: 5)

    def program(source: str) -> Finished:
        command = [sys.executable, "-I", "-S", "-c", source]
        return run(command, limits=LIMITS, mechanisms=SET_B)

    finished = program("""
import os, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
child = os.fork()
if child == 0: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for pid in (os.getppid(), os.getpid(), -1):
    try: os.kill(pid, 0)
    except PermissionError: print("refused")
os.kill(0, 9)
""")
    assert (finished.outcome, finished.code) == ("signal", -9), finished
    assert program("import os; os.abort()").outcome == "signal"


def test_children_are_found_without_the_kernel_s_list() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in watchdog._by_parent()(os.getpid())
        assert child.pid in watchdog.descendants(os.getpid())
        child.communicate(b"\n")


def test_an_ordinary_user_s_other_tasks_do_not_count_against_the_program() -> None:
    user = os.geteuid()
    mine = limits.tasks_of(user)
    assert mine >= 1
    assert limits.tasks_allowed(8, user, contained=False) >= mine / 2 + 8
    assert limits.tasks_allowed(8, user + 1, contained=False) == 8
    assert limits.tasks_allowed(8, user, contained=True) >= 9
