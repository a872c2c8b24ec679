"""What a model's program tries in order to get out of the sandbox, with each set of mechanisms:
files, environment, what is left behind.

Every attack runs for real, and so does what it is aimed at. These files are run a second time as
an ordinary user where the first time was as root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sampler.sandbox import NotIsolated, run
from sampler.sandbox.process import open_to_all
from tests.attacks.sandboxed import LIMITS, PRELUDE, SETS, Sandbox, refused

ROOT = Path(__file__).parents[2]
CANARY = "hush-4c1d77e0aa"
NOBODY = 65534


def test_outside_of_the_sandbox_the_attacks_succeed(
    bystander: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    secret = tmp_path / "secret.key"
    secret.write_text(CANARY)
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        source = f"""
attempt("read", lambda: open({str(secret)!r}).read())
attempt("environ", lambda: open("/proc/{os.getpid()}/environ").read(1))
attempt("write", lambda: open({str(tmp_path / "new")!r}, "w"))
attempt("mode", lambda: os.chmod({str(secret)!r}, 0o666))
attempt("tcp", lambda: socket.create_connection({tcp.getsockname()!r}))
attempt("shell", lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "true"], {{}}))
attempt("memory-file", lambda: os.memfd_create("x"))
attempt("inotify", lambda: call(294, 26, 0))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, {bystander.pid}, 19))
attempt("queue", lambda: call(129, 138, {bystander.pid}, 0, (ctypes.c_int * 32)(0, 0, -1)))
attempt("kill", lambda: os.kill({bystander.pid}, 9))
"""
        command = [sys.executable, "-I", "-S", "-c", PRELUDE + source]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.count(" GOT ") == 11, done.stdout
    assert bystander.wait(30) == -signal.SIGKILL


def test_no_file_of_the_machine_can_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.key"
    secret.write_text(CANARY)
    paths = ["/etc/passwd", "/etc/shadow", "/etc/hostname", secret, ROOT / "pyproject.toml"]
    paths += ["/proc/self/environ", "/proc/1/cmdline", f"/proc/{os.getpid()}/environ"]
    paths += [f"/proc/{os.getpid()}/cmdline", "/proc/version", "/sys/kernel/uevent_seqnum"]
    source = "".join(f"attempt({str(p)!r}, open({str(p)!r}).read)\n" for p in paths)
    source = source.replace(", open(", ", lambda: open(").replace(").read)", ").read())")
    for folder in ("/root", "/home", "/etc", "/proc", "/sys", "/var", tmp_path, ROOT, Path.home()):
        source += f"attempt('list:{folder}', lambda: os.listdir({str(folder)!r}))\n"
    attempts = sandbox.attempts(source)
    harmless = {
        # a path on the way to the interpreter or to the libraries, empty but for that
        name
        for name, outcome in attempts.items()
        if name.startswith("list:") and sandbox.contained and CANARY not in outcome
    }
    got = {name: outcome for name, outcome in attempts.items() if "GOT" in outcome}
    assert set(got) <= harmless, got
    assert "refused" in attempts[str(secret)]


def test_what_namespaces_show_is_the_readable_and_the_scratch_alone(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    if not sandbox.contained:
        pytest.skip("names can be asked for without namespaces (docs/sandbox.md)")
    # Given a file to read, and what is there for everybody outside, a secret beside it among that
    (tmp_path / "readable").mkdir()
    (tmp_path / "readable" / "a.txt").write_text("a")
    secret = tmp_path / ".ssh" / "id_ed25519"
    secret.parent.mkdir()
    secret.write_text(CANARY)
    places = ["/proc/self", "/sys/kernel", "/etc/passwd", ROOT / "pyproject.toml", secret.parent]
    hidden = [str(place) for place in (*places, secret)]
    assert secret.read_text() == CANARY
    assert [name for name in hidden if Path(name).exists()] == hidden
    # When a program asks for their names
    source = f"""
print(sorted(os.listdir({str(tmp_path)!r})), open({str(tmp_path / "readable" / "a.txt")!r}).read())
print([name for name in {hidden!r} if os.path.lexists(name)])
"""
    limited = sandbox.mechanisms == SETS["A"]  # Landlock refuses to list what only leads there
    if not limited:
        source = source.replace(f"sorted(os.listdir({str(tmp_path)!r}))", "['readable']")
    finished = sandbox.run(source, readable=[tmp_path / "readable"])
    # Then it finds the readable one alone
    assert finished.stdout.decode().split("\n")[:2] == ["['readable'] a", "[]"], finished


def test_no_secret_of_the_environment_is_seen(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    finished = sandbox.run("print(sorted(os.environ), CANARY_IN := str(os.environ))")
    assert b"PATH" in finished.stdout
    assert CANARY.encode() not in finished.stdout


def test_no_open_file_of_the_parent_is_inherited(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "open.key"
    secret.write_text(CANARY)
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        source = """
for number in range(1024):
    try: os.fstat(number)
    except OSError: continue
    print(number)
"""
        finished = sandbox.run(source)
    assert finished.stdout.split() == [b"0", b"1", b"2"]


def test_nothing_outside_is_written(sandbox: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "readable"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "file").write_text(CANARY)
    (folder / "file").chmod(0o666)
    (folder / "gone").write_text(CANARY)
    source = f"""
f = {str(folder)!r}
attempt("write", lambda: open(f + "/file", "w"))
attempt("append", lambda: open(f + "/file", "a"))
attempt("empty", lambda: os.open(f + "/file", os.O_RDONLY | os.O_TRUNC))
attempt("truncate", lambda: os.truncate(f + "/file", 0))
attempt("create", lambda: open(f + "/new", "x"))
attempt("remove", lambda: os.unlink(f + "/gone"))
attempt("mkdir", lambda: os.mkdir(f + "/dir"))
attempt("rename", lambda: os.rename(f + "/gone", f + "/else"))
attempt("link", lambda: os.link(f + "/file", "mine"))
attempt("symlink", lambda: os.symlink("x", f + "/link"))
attempt("fifo", lambda: os.mkfifo(f + "/fifo"))
attempt("mode", lambda: os.chmod(f + "/file", 0o777))
attempt("times", lambda: os.utime(f + "/file", (1, 1)))
attempt("owner", lambda: os.chown(f + "/file", 1, 1))
attempt("xattr", lambda: os.setxattr(f + "/file", "user.x", b"1"))
attempt("tmp", lambda: open({str(sandbox.directory / "outside")!r}, "w"))
attempt("library", lambda: open(os.__file__, "a"))
attempt("root", lambda: open("/outside", "w"))
attempt("lease", lambda: fcntl.fcntl(os.open(f + "/file", os.O_RDONLY), 1024, 1))
"""
    before = (folder / "file").stat()
    attempts = sandbox.attempts(source, readable=[folder])
    if not sandbox.filtered:
        attempts.pop("lease")
    assert refused(attempts), attempts
    assert sorted(path.name for path in folder.iterdir()) == ["file", "gone"]
    assert (folder / "file").read_text() == CANARY
    after = (folder / "file").stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


def test_no_device_but_the_harmless(sandbox: Sandbox) -> None:
    names = ["mem", "kmsg", "vda", "sda", "tty", "console", "ptmx", "fuse", "kvm", "net/tun"]
    source = "".join(f"attempt({n!r}, lambda: open('/dev/{n}', 'rb'))\n" for n in names)
    attempts = sandbox.attempts(source)
    assert refused(attempts), attempts
    finished = sandbox.run("print(len(open('/dev/urandom', 'rb').read(8)), open('/dev/null', 'w'))")
    assert finished.stdout.startswith(b"8 "), finished


def test_no_program_that_is_not_the_interpreter_s_runs(sandbox: Sandbox) -> None:
    attempts = sandbox.attempts(
        "attempt('shell', lambda: os.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {}))\n"
        "attempt('su', lambda: os.execv('/usr/bin/su', ['su']))\n"
    )
    assert refused(attempts), attempts


def test_links_in_the_scratch_lead_nobody_out(sandbox: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text(CANARY)
    source = f"""
os.symlink({str(outside)!r}, "folder")
os.symlink({str(outside / "kept")!r}, "file")
os.mkdir("closed")
open("closed/x", "w").close()
os.symlink({str(outside)!r}, "closed/folder")
if {sandbox.contained}: os.chmod("closed", 0)
for _ in range(1500):
    os.mkdir("d"); os.chdir("d")
print("made")
"""
    finished = sandbox.run(source)
    assert finished.stdout == b"made\n", finished
    assert (outside / "kept").read_text() == CANARY


def test_nothing_is_left_in_shared_places(sandbox: Sandbox) -> None:
    places = [f"{folder}/{sandbox.token}" for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run")]
    source = "".join(f"attempt({p!r}, lambda: open({p!r}, 'w').write('x'))\n" for p in places)
    attempts = sandbox.attempts(source)
    # /dev/shm and /tmp lead to the scratch directory where the root is the sandbox's own
    assert refused({p: got for p, got in attempts.items() if not sandbox.contained}), attempts
    assert [place for place in places if Path(place).exists()] == []


def test_a_file_of_the_grader_cannot_be_put_outside_the_scratch(sandbox: Sandbox) -> None:
    for name in ("../x", "/etc/x", "a/../../x", ""):
        with sandbox.unchanged(), pytest.raises(ValueError, match="below the scratch"):
            run([sys.executable], limits=LIMITS, files={name: b""}, mechanisms=sandbox.mechanisms)


def test_huge_arguments_end_in_a_message(sandbox: Sandbox) -> None:
    with sandbox.unchanged(), pytest.raises(NotIsolated, match="Argument list too long"):
        run(
            [sys.executable, "-c", "pass", *["x" * 100_000] * 100],
            limits=LIMITS,
            mechanisms=sandbox.mechanisms,
        )
    attempts = sandbox.attempts(
        "attempt('exec', lambda: os.execve(sys.executable, ['x'], {'a': 'x' * 9_000_000}))"
    )
    assert refused(attempts), attempts


@pytest.mark.slow
def test_all_this_holds_for_an_ordinary_user() -> None:
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root, and an interpreter that everybody can reach")
    packages = Path(pytest.__file__).parents[1]
    if not open_to_all([bytes(packages), bytes(ROOT)]):
        pytest.skip("needs a checkout that everybody can read")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        names = [f"test_sandbox{part}.py" for part in ("", "_calls", "_bombs")]
        files = [f"tests/attacks/{name}" for name in names]
        options = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [python, *options, "--basetemp", f"{directory}/base", *files],
            cwd=ROOT,
            env={
                "PYTHONPATH": f"{ROOT}:{packages}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": directory,
                "TMPDIR": directory,
                "PATH": "/usr/bin:/bin",
            },
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
