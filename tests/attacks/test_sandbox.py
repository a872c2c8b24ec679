"""What a model's program tries in order to get out of the sandbox, with each set of mechanisms.

Every attack runs for real, and so does what it is aimed at. The same file is run a second time as
an ordinary user where the first time was as root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sampler.sandbox import NotIsolated, run
from tests.attacks.sandboxed import LIMITS, SETS, Sandbox, make_sandbox, refused

ROOT = Path(__file__).parents[2]
CANARY = "hush-4c1d77e0aa"
NOBODY = 65534


@pytest.fixture(params=list(SETS))
def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sandbox:
    directory = tmp_path / "scratches"
    directory.mkdir()
    tmp_path.chmod(0o755)
    return make_sandbox(request.param, directory, monkeypatch)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that has nothing to do with it."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as process:
        yield process
        process.kill()


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
    (tmp_path / "readable").mkdir()
    (tmp_path / "readable" / "a.txt").write_text("a")
    (tmp_path / "beside.txt").write_text("b")
    source = f"""
print(sorted(os.listdir({str(tmp_path)!r})), open({str(tmp_path / "readable" / "a.txt")!r}).read())
print(os.path.exists("/proc/self"), os.path.exists("/sys/kernel"), os.path.exists("/root/.ssh"))
print(os.path.exists("/etc/passwd"), os.path.exists({str(ROOT / ".git")!r}))
"""
    limited = sandbox.mechanisms == SETS["A"]  # Landlock refuses to list what only leads there
    if not limited:
        source = source.replace(f"sorted(os.listdir({str(tmp_path)!r}))", "['readable']")
    finished = sandbox.run(source, readable=[tmp_path / "readable"])
    assert finished.stdout.decode().split("\n")[:3] == [
        "['readable'] a",
        "False False False",
        "False False",
    ], finished


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


def test_no_network(sandbox: Sandbox, tmp_path: Path) -> None:
    tcp, udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
    named, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    folder = tmp_path / "socket"
    folder.mkdir()
    with tcp, udp, named, abstract, datagram:
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        named.bind(str(folder / "stream"))
        datagram.bind(str(folder / "datagram"))
        (folder / "stream").chmod(0o777)
        (folder / "datagram").chmod(0o777)
        abstract.bind(f"\0{sandbox.token}")
        for listener in (tcp, named, abstract):
            listener.listen()
        source = f"""
def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(5)
        s.connect(address)
        s.send(b"x")
stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
inet, unix = socket.AF_INET, socket.AF_UNIX
attempt("tcp", lambda: connect(inet, stream, ("127.0.0.1", {tcp.getsockname()[1]})))
attempt("udp", lambda: connect(inet, datagram, ("127.0.0.1", {udp.getsockname()[1]})))
attempt("six", lambda: connect(socket.AF_INET6, stream, ("::1", {tcp.getsockname()[1]})))
attempt("outside", lambda: connect(inet, stream, ("192.0.2.1", 80)))
attempt("named", lambda: connect(unix, stream, {str(folder / "stream")!r}))
attempt("abstract", lambda: connect(unix, stream, "\\0{sandbox.token}"))
attempt("datagram", lambda: connect(unix, datagram, {str(folder / "datagram")!r}))
attempt("raw", lambda: socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("vsock", lambda: connect(socket.AF_VSOCK, stream, (2, 1024)))
def through_a_pair():
    a, b = socket.socketpair(unix, datagram)
    return a.sendto(b"x", {str(folder / "datagram")!r})
attempt("pair", through_a_pair)
"""
        attempts = sandbox.attempts(source)
        assert refused(attempts), attempts
        for receiver in (udp, datagram):
            receiver.setblocking(False)
            with pytest.raises(BlockingIOError):
                receiver.recv(1)
        for listener in (tcp, named, abstract):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_pair_of_streams_is_still_there(sandbox: Sandbox) -> None:
    finished = sandbox.run("a, b = socket.socketpair(); a.sendall(b'x'); print(b.recv(1))")
    assert finished.stdout == b"b'x'\n", finished


def test_no_other_process_is_signalled(
    sandbox: Sandbox, bystander: subprocess.Popen[bytes]
) -> None:
    source = f"""
for name, pid in (("bystander", {bystander.pid}), ("test", {os.getpid()})):
    attempt(name + "-kill", lambda: os.kill(pid, 9 if name == "bystander" else 0))
    attempt(name + "-group", lambda: os.killpg(pid, 9 if name == "bystander" else 0))
    attempt(name + "-thread", lambda: call(234, 131, pid, pid, 0))
    attempt(name + "-queue", lambda: call(129, 138, pid, 0, None))
    attempt(name + "-pidfd", lambda: call(434, 434, pid, 0))
    attempt(name + "-limits", lambda: call(302, 261, pid, 7, None, (ctypes.c_ulong * 2)()))
    attempt(name + "-priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    attempt(name + "-affinity", lambda: os.sched_setaffinity(pid, {{0}}))
    attempt(name + "-owner", lambda: fcntl.fcntl(0, 8, pid))
"""
    attempts = sandbox.attempts(source)
    if not sandbox.filtered:  # the owner of a descriptor is a number there that means nobody
        attempts = {name: got for name, got in attempts.items() if not name.endswith("-owner")}
    assert refused(attempts), attempts
    assert bystander.poll() is None


def test_the_guard_and_the_supervisor_are_out_of_reach(sandbox: Sandbox) -> None:
    source = """
for name, pid in (("parent", os.getppid()), ("first", 1)):
    for number in (9, 15, 19):
        try: os.kill(pid, number)
        except OSError: pass
    attempt(name + "-trace", lambda: call(101, 117, 16, pid, None, None))
    attempt(name + "-read", lambda: call(310, 270, pid, None, 0, None, 0, 0) or 1 / 0)
print("alive still", flush=True)
""".replace("or 1 / 0", "")
    finished = sandbox.run(source)
    assert finished.ok, finished
    lines = finished.stdout.decode().splitlines()
    assert lines[-1] == "alive still"
    assert all("refused" in line for line in lines if "-trace" in line), lines


def test_no_memory_of_others_is_read(sandbox: Sandbox, bystander: subprocess.Popen[bytes]) -> None:
    secret = ctypes.create_string_buffer(CANARY.encode())
    source = f"""
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(64)
mine = Vector(ctypes.addressof(buffer), 14)
theirs = Vector({ctypes.addressof(secret)}, 14)
def read():
    call(310, 270, {os.getpid()}, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return buffer.raw
attempt("read", read)
attempt("trace", lambda: call(101, 117, 16, {bystander.pid}, None, None))
attempt("memory", lambda: open("/proc/{os.getpid()}/mem", "rb"))
attempt("descriptor", lambda: call(438, 438, call(434, 434, {os.getpid()}, 0), 0, 0))
"""
    attempts = sandbox.attempts(source)
    assert len(attempts) == 4
    assert refused(attempts), attempts


def test_no_further_namespace_mount_or_root(sandbox: Sandbox) -> None:
    source = """
attempt("user", lambda: call(272, 97, 0x10000000))
attempt("user+mount", lambda: call(272, 97, 0x10020000))
attempt("mount", lambda: call(272, 97, 0x00020000))
attempt("net", lambda: call(272, 97, 0x40000000))
attempt("tmpfs", lambda: call(165, 40, b"tmpfs", b".", b"tmpfs", 0, None))
attempt("writable", lambda: call(165, 40, None, b"/", None, 32 | 4096, None))
attempt("umount", lambda: call(166, 39, b"/", 2))
attempt("chroot", lambda: os.chroot("."))
attempt("pivot", lambda: call(155, 41, b".", b"."))
attempt("root", lambda: os.setresuid(0, 0, 0))
attempt("node", lambda: os.mknod("device", 0o60600, os.makedev(1, 1)))
attempt("opentree", lambda: call(428, 428, -100, b"/", 1))
attempt("fsopen", lambda: call(430, 430, b"tmpfs", 0))
attempt("cloned", lambda: call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0))
"""
    attempts = sandbox.attempts(source)
    assert refused(attempts), attempts


def test_no_call_into_the_kernel_s_far_corners(sandbox: Sandbox) -> None:
    source = """
attempt("bpf", lambda: call(321, 280, 0, (ctypes.c_char * 128)(), 128))
attempt("perf", lambda: call(298, 241, (ctypes.c_char * 128)(), 0, -1, -1, 0))
attempt("modules", lambda: call(313, 273, 0, b"", 0))
attempt("reboot", lambda: call(169, 142, 0, 0, 0, None))
attempt("handle", lambda: call(304, 265, -100, (ctypes.c_char * 128)(), 0))
attempt("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt("swap", lambda: call(167, 224, b"/", 0))
"""
    if sandbox.filtered:
        source += """
attempt("userfaultfd", lambda: call(323, 282, 1))
attempt("uring", lambda: call(425, 425, 8, (ctypes.c_char * 128)()))
attempt("keys", lambda: call(250, 219, 0, -3, 0))
attempt("shm", lambda: call(29, 194, 0, 4096, 0o1600))
attempt("queue", lambda: call(240, 180, b"q", 0o102, 0o600, None))
attempt("memory-file", lambda: os.memfd_create("x"))
attempt("inotify", lambda: call(294, 26, 0))
attempt("fanotify", lambda: call(300, 262, 0, 0))
attempt("personality", lambda: call(135, 92, 0x0040000))
attempt("secret", lambda: call(447, 447, 0))
attempt("unknown", lambda: call(1000, 1000))
attempt("typing", lambda: fcntl.ioctl(0, 0x5412, b"x"))
"""
    attempts = sandbox.attempts(source)
    assert refused(attempts), attempts


def test_no_key_of_the_parent_is_found(sandbox: Sandbox) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    x86 = os.uname().machine == "x86_64"
    name, session = sandbox.token.encode(), -3
    key = libc.syscall(248 if x86 else 217, b"user", name, CANARY.encode(), len(CANARY), session)
    if key < 0:
        pytest.skip("no keyrings here")
    try:
        source = f"attempt('key', lambda: call(249, 218, b'user', {name!r}, None, 0))"
        attempts = sandbox.attempts(source)
        assert refused(attempts), attempts
    finally:
        libc.syscall(250 if x86 else 219, 9, key, session)


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
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        names = ["test_sandbox.py", "test_sandbox_bombs.py"]
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
