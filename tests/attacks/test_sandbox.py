"""Programs that try to get out of the sandbox, or to take all they can get, with each set of
mechanisms, and the machine before and after them.

Every attack runs for real, and so does what it is aimed at. This file is run a second time as an
ordinary user where the first time was as root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sampler.sandbox import PYTHON, Limits, NotIsolated, probe, run, start
from sampler.sandbox.inside.kernel import spare_user
from sampler.sandbox.process import SET_A, SET_B, Finished, Isolated, open_to_all
from tests.waiting import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CANARY = "hush-4c1d77e0aa"
NOBODY = 65534
SETS = {"A": SET_A, "B": SET_B, "A and B": (*SET_A, *SET_B)}
LIMITS = Limits(wall_s=600.0, cpu_s=60.0, memory_bytes=256 << 20, processes=8, file_bytes=2 << 20)
X86 = os.uname().machine == "x86_64"
PRELUDE = """
import ctypes, fcntl, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"

def call(x86, arm, *arguments):
    number = x86 if X86 else arm
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def none():
    raise OSError("there is none")

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(5)
        s.connect(address)
        s.send(b"x")

def through_a_pair(address):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return a.sendto(b"x", address)

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

def read_memory(pid, address):
    buffer = ctypes.create_string_buffer(64)
    mine, theirs = Vector(ctypes.addressof(buffer), 14), Vector(address, 14)
    call(310, 270, pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return buffer.raw

def attempt(name, function):
    try:
        got = function()
    except (OSError, ValueError) as error:
        print(f"{name}\\trefused {error}", flush=True)
    else:
        print(f"{name}\\tGOT {got!r}"[:300], flush=True)
"""


@dataclass
class Sandbox:
    """Runs attacks under one set of mechanisms, in a temporary directory that is the test's own."""

    mechanisms: Sequence[str]
    directory: Path
    token: str = field(default_factory=lambda: f"attack-{uuid.uuid4().hex}")

    @property
    def contained(self) -> bool:
        """Whether namespaces are among the mechanisms."""
        return "namespaces" in self.mechanisms

    @property
    def filtered(self) -> bool:
        """Whether a seccomp filter is among them."""
        return "seccomp" in self.mechanisms

    def command(self, source: str) -> list[str]:
        return [*PYTHON, "-S", "-c", PRELUDE + source, self.token]

    def run(
        self, source: str, *, limits: Limits = LIMITS, readable: Sequence[Path] = ()
    ) -> Finished:
        """Runs a program to its end and holds the machine against what it was before."""
        given = {"limits": limits, "readable": readable, "mechanisms": self.mechanisms}
        with self.unchanged():
            return run(self.command(source), **given)

    def start(self, source: str) -> Isolated:
        return start(self.command(source), limits=LIMITS, mechanisms=self.mechanisms)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """No process, no file of the attack outlives it, and no descriptor stays open here."""
        before = open_files()
        yield
        assert self.processes() == []
        assert list(self.directory.iterdir()) == []
        # (a thread of another test may have a socket open for a moment)
        eventually(lambda: open_files() <= before, "no descriptor of it is open")

    def processes(self) -> list[int]:
        """Process ids of everything that still runs the attack (launcher and guard aside)."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.token.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found

    def until_running(self, count: int) -> None:
        eventually(lambda: len(self.processes()) >= count, f"{count} processes of the attack")

    def until_gone(self) -> None:
        eventually(lambda: self.processes() == [], "the end of the attack's processes")


def open_files() -> set[str]:
    """What this process has open, pipes and sockets by their numbers."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this very look
            found.add(str(path.readlink()))
    return found


@pytest.fixture(params=list(SETS))
def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sandbox:
    """A sandbox for each set of mechanisms that this machine has."""
    mechanisms = SETS[request.param]
    if missing := set(mechanisms) - set(probe().working):
        pytest.skip(f"{', '.join(sorted(missing))} not available here")
    directory = tmp_path / "scratches"
    directory.mkdir()
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return Sandbox(mechanisms, directory)


# -- Escapes: all in one program -------------------------------------------------------------------


class Targets:
    """What there is to get outside: files, sockets, a process, memory, a key."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.secret = folder, folder / ".ssh" / "id_ed25519"
        self.readable, self.name = folder / "readable", uuid.uuid4().hex
        self.secret.parent.mkdir()
        self.secret.write_text(CANARY)
        self.readable.mkdir(mode=0o777)
        for name in ("file", "gone"):
            (self.readable / name).write_text(CANARY)
            (self.readable / name).chmod(0o666)
        file = stack.enter_context(self.secret.open())
        os.set_inheritable(file.fileno(), True)
        sleep = ["sleep", "6000"]
        self.bystander = stack.enter_context(subprocess.Popen(sleep, start_new_session=True))
        stack.callback(self.bystander.kill)
        self.memory = ctypes.create_string_buffer(CANARY.encode())
        dgram, unix = socket.SOCK_DGRAM, socket.AF_UNIX
        self.streams = [socket.socket(), socket.socket(unix), socket.socket(unix)]
        self.datagrams = [socket.socket(type=dgram), socket.socket(unix, dgram)]
        (tcp, named, abstract), (udp, datagram) = self.streams, self.datagrams
        for each, address in (
            *((tcp, ("127.0.0.1", 0)), (udp, ("127.0.0.1", 0)), (abstract, f"\0{self.name}")),
            *((named, str(folder / "stream")), (datagram, str(folder / "datagram"))),
        ):
            stack.enter_context(each).bind(address)
        for name in ("stream", "datagram"):
            (folder / name).chmod(0o777)
        for each in self.streams:
            each.listen()
        self.tcp, self.udp = tcp.getsockname()[1], udp.getsockname()[1]
        libc, key = ctypes.CDLL(None, use_errno=True), self.name.encode()
        add = (248 if X86 else 217, b"user", key, CANARY.encode(), len(CANARY), -3)
        if (number := libc.syscall(*add)) >= 0:
            stack.callback(libc.syscall, 250 if X86 else 219, 9, number, -3)

    def unharmed(self) -> bool:
        """Nothing was received, changed or killed."""
        for each in (*self.streams, *self.datagrams):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.accept() if each in self.streams else each.recv(1)
        files = {path.name: path.read_text() for path in self.readable.iterdir()}
        return files == {"file": CANARY, "gone": CANARY} and self.bystander.poll() is None


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Targets]:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    with ExitStack() as stack:
        yield Targets(tmp_path, stack)


def escapes(targets: Targets, scratches: Path) -> dict[str, str]:
    """{name: expression} of all that a program tries."""
    t, me, by = targets, os.getpid(), targets.bystander.pid
    f, unix = str(t.readable), "socket.AF_UNIX, socket.SOCK_STREAM"
    places = ["/proc/self", "/sys/kernel", "/etc/passwd", ROOT / "pyproject.toml"]
    hidden = [str(place) for place in (*places, t.secret.parent, t.secret)]
    assert all(Path(name).exists() for name in hidden)
    secrets = [*hidden[2:4], t.secret, "/etc/shadow", "/etc/hostname", "/proc/version"]
    secrets += ["/proc/self/environ", "/proc/1/cmdline", f"/proc/{me}/environ", f"/proc/{me}/mem"]
    folders = ["/root", "/home", "/etc", "/proc", "/sys", "/var", t.folder, ROOT, Path.home()]
    devices = ["mem", "kmsg", "vda", "sda", "tty", "console", "ptmx", "fuse", "kvm", "net/tun"]
    shared = [f"{folder}/{t.name}" for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run")]
    return {
        "descriptors": "[n for n in range(3, 1024) if is_open(n)] or none()",
        "environment": f"[v for v in os.environ.values() if {CANARY!r} in v] or none()",
        **{f"read {path}": f"open({str(path)!r}).read()" for path in secrets},
        **{f"list {path}": f"os.listdir({str(path)!r})" for path in folders},
        "names": f"[n for n in {hidden!r} if os.path.lexists(n)] or none()",
        # writes
        "write": f"open('{f}/file', 'w')",
        "append": f"open('{f}/file', 'a')",
        "empty": f"os.open('{f}/file', os.O_RDONLY | os.O_TRUNC)",
        "truncate": f"os.truncate('{f}/file', 0)",
        "create": f"open('{f}/new', 'x')",
        "remove": f"os.unlink('{f}/gone')",
        "mkdir": f"os.mkdir('{f}/dir')",
        "rename": f"os.rename('{f}/gone', '{f}/else')",
        "link": f"os.link('{f}/file', 'mine')",
        "symlink": f"os.symlink('x', '{f}/link')",
        "fifo": f"os.mkfifo('{f}/fifo')",
        "mode": f"os.chmod('{f}/file', 0o777)",
        "times": f"os.utime('{f}/file', (1, 1))",
        "owner": f"os.chown('{f}/file', 1, 1)",
        "xattr": f"os.setxattr('{f}/file', 'user.x', b'1')",
        "scratches": f"open({str(scratches / 'outside')!r}, 'w')",
        "library": "open(os.__file__, 'a')",
        "root folder": "open('/outside', 'w')",
        "lease": f"fcntl.fcntl(os.open('{f}/file', os.O_RDONLY), 1024, 1)",
        **{f"shared {path}": f"open({path!r}, 'w').write('x')" for path in shared},
        **{f"device {name}": f"open('/dev/{name}', 'rb')" for name in devices},
        # programs
        "shell": "os.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {})",
        "su": "os.execv('/usr/bin/su', ['su'])",
        "huge": "os.execve(sys.executable, ['x'], {'a': 'x' * 9_000_000})",
        # network
        "tcp": f"connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', {t.tcp}))",
        "udp": f"connect(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', {t.udp}))",
        "six": f"connect(socket.AF_INET6, socket.SOCK_STREAM, ('::1', {t.tcp}))",
        "outside": "connect(socket.AF_INET, socket.SOCK_STREAM, ('192.0.2.1', 80))",
        "named": f"connect({unix}, {str(t.folder / 'stream')!r})",
        "abstract": f"connect({unix}, chr(0) + {t.name!r})",
        "datagram": f"connect(socket.AF_UNIX, socket.SOCK_DGRAM, {str(t.folder / 'datagram')!r})",
        "pair": f"through_a_pair({str(t.folder / 'datagram')!r})",
        "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
        "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "vsock": "connect(socket.AF_VSOCK, socket.SOCK_STREAM, (2, 1024))",
        # other processes
        **{
            f"{what} {pid}": expression.format(pid=pid, signal=9 if pid == by else 0)
            for pid in (by, me)
            for what, expression in {
                "kill": "os.kill({pid}, {signal})",
                "group": "os.killpg({pid}, {signal})",
                "thread": "call(234, 131, {pid}, {pid}, 0)",
                "queue": "call(129, 138, {pid}, 0, (ctypes.c_int * 32)(0, 0, -1))",
                "pidfd": "call(434, 434, {pid}, 0)",
                "limits": "call(302, 261, {pid}, 7, None, (ctypes.c_ulong * 2)())",
                "priority": "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
                "affinity": "os.sched_setaffinity({pid}, {{0}})",
                "owns": "fcntl.fcntl(0, 8, {pid})",
                "trace": "call(101, 117, 16, {pid}, None, None)",
            }.items()
        },
        "memory": f"read_memory({me}, {ctypes.addressof(t.memory)})",
        "take": f"call(438, 438, call(434, 434, {me}, 0), 0, 0)",
        # namespaces, mounts, root
        "user": "call(272, 97, 0x10000000)",
        "user+mount": "call(272, 97, 0x10020000)",
        "mount": "call(272, 97, 0x00020000)",
        "net": "call(272, 97, 0x40000000)",
        "tmpfs": "call(165, 40, b'tmpfs', b'.', b'tmpfs', 0, None)",
        "writable": "call(165, 40, None, b'/', None, 32 | 4096, None)",
        "umount": "call(166, 39, b'/', 2)",
        "chroot": "os.chroot('.')",
        "pivot": "call(155, 41, b'.', b'.')",
        "root": "os.setresuid(0, 0, 0)",
        "node": "os.mknod('device', 0o60600, os.makedev(1, 1))",
        "opentree": "call(428, 428, -100, b'/', 1)",
        "fsopen": "call(430, 430, b'tmpfs', 0)",
        "cloned": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
        # the kernel's far corners
        "bpf": "call(321, 280, 0, (ctypes.c_char * 128)(), 128)",
        "perf": "call(298, 241, (ctypes.c_char * 128)(), 0, -1, -1, 0)",
        "modules": "call(313, 273, 0, b'', 0)",
        "reboot": "call(169, 142, 0, 0, 0, None)",
        "handle": "call(304, 265, -100, (ctypes.c_char * 128)(), 0)",
        "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
        "swap": "call(167, 224, b'/', 0)",
        "key": f"call(249, 218, b'user', {t.name.encode()!r}, None, 0)",
        "userfaultfd": "call(323, 282, 1)",
        "uring": "call(425, 425, 8, (ctypes.c_char * 128)())",
        "keys": "call(250, 219, 0, -3, 0)",
        "shm": "call(29, 194, 0, 4096, 0o1600)",
        "messages": "call(240, 180, b'q', 0o102, 0o600, None)",
        "memory-file": "os.memfd_create('x')",
        "inotify": "call(294, 26, 0)",
        "fanotify": "call(300, 262, 0, 0)",
        "personality": "call(135, 92, 0x0040000)",
        "secret": "call(447, 447, 0)",
        "unknown": "call(1000, 1000)",
        "typing": "fcntl.ioctl(0, 0x5412, b'x')",
    }


BY_FILTER = {
    *("lease", "vsock", "userfaultfd", "uring", "keys", "shm", "messages", "memory-file"),
    *("inotify", "fanotify", "personality", "secret", "unknown", "typing"),
}
"""What is refused where a filter is among the mechanisms; without it, it harms nobody outside."""
THE_GUARD = """
for name, pid in (("parent", os.getppid()), ("first", 1)):
    for number in (9, 15, 19):
        try: os.kill(pid, number)
        except OSError: pass
    attempt(f"trace {name}", lambda: call(101, 117, 16, pid, None, None))
a, b = socket.socketpair()
a.sendall(b"x")
print("alive", b.recv(1), len(open("/dev/urandom", "rb").read(8)), open("/dev/null", "w").name)
"""


def attempts(tried: Mapping[str, str]) -> str:
    return "".join(f"attempt({name!r}, lambda: {what})\n" for name, what in tried.items())


def outcomes(text: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)


def test_no_escape_succeeds(sandbox: Sandbox, targets: Targets) -> None:
    before = (targets.readable / "file").stat()
    tried = escapes(targets, sandbox.directory)
    finished = sandbox.run(attempts(tried) + THE_GUARD, readable=[targets.readable])
    assert finished.ok, finished
    said = finished.stdout.decode()
    found = outcomes(said)
    assert len(found) == len(tried) + 2 and said.endswith("alive b'x' 8 /dev/null\n"), said
    got = {name: outcome for name, outcome in found.items() if not outcome.startswith("refused")}
    allowed = set() if sandbox.filtered else BY_FILTER | {n for n in got if n.startswith("owns ")}
    if sandbox.contained:
        # a path on the way to the interpreter or to what is readable, and empty but for that
        allowed |= {name for name in got if name.startswith("list ")}
        assert got.get(f"list {targets.folder}", "GOT ['readable']") == "GOT ['readable']"
        # /dev/shm and /tmp lead to the scratch directory, for the root is the sandbox's own
        allowed |= {name for name in got if name.startswith("shared ")}
    else:
        allowed |= {"names"}  # they can be asked for without namespaces (docs/sandbox.md)
    assert {name: outcome for name, outcome in got.items() if name not in allowed} == {}
    after = (targets.readable / "file").stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert targets.unharmed()
    shared = [Path(name.removeprefix("shared ")) for name in tried if name.startswith("shared ")]
    assert [path for path in shared if path.exists()] == []


def test_outside_of_the_sandbox_escapes_succeed(targets: Targets, tmp_path: Path) -> None:
    names = ["environment", f"read {targets.secret}", f"list {tmp_path}", "names", "write", "mode"]
    names += [
        "tcp",
        "named",
        "shell",
        "memory-file",
        "inotify",
        f"priority {targets.bystander.pid}",
    ]
    names += [f"queue {targets.bystander.pid}", f"kill {targets.bystander.pid}"]
    tried = escapes(targets, tmp_path)
    source = PRELUDE + attempts({name: tried[name] for name in names})
    command = [sys.executable, "-I", "-S", "-c", source]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    found = outcomes(done.stdout)
    assert {name for name in names if found[name].startswith("GOT ")} == set(names), found
    assert targets.bystander.wait(600) == -signal.SIGKILL


def test_links_in_the_scratch_lead_nobody_out(sandbox: Sandbox, targets: Targets) -> None:
    source = f"""
os.symlink({str(targets.readable)!r}, "folder")
os.symlink({str(targets.secret)!r}, "file")
os.mkdir("closed")
open("closed/x", "w").close()
os.symlink({str(targets.readable)!r}, "closed/folder")
if {sandbox.contained}: os.chmod("closed", 0)
for _ in range(1100):
    os.mkdir("d"); os.chdir("d")
print("made")
"""
    finished = sandbox.run(source)
    assert finished.stdout == b"made\n", finished
    assert targets.unharmed() and targets.secret.read_text() == CANARY


def test_what_cannot_be_started_is_told(sandbox: Sandbox) -> None:
    given = {"limits": LIMITS, "mechanisms": sandbox.mechanisms}
    for name in ("../x", "/etc/x", "a/../../x", ""):
        with sandbox.unchanged(), pytest.raises(ValueError, match="below the scratch"):
            run([sys.executable], files={name: b""}, **given)
    with sandbox.unchanged(), pytest.raises(NotIsolated, match="Argument list too long"):
        run([sys.executable, "-c", "pass", *["x" * 100_000] * 100], **given)


# -- Bombs: programs that take without end ---------------------------------------------------------

SLEEPERS = """
import threading
def fork():
    if os.fork() == 0:
        time.sleep(6000)
        os._exit(0)
def thread(): threading.Thread(target=time.sleep, args=(6000,), daemon=True).start()
made = 0
try:
    while made < 100:
        {kind}()
        made += 1
    time.sleep(6000)
finally:
    print(made, flush=True)
"""


@pytest.mark.parametrize("kind", ["fork", "thread"])
def test_a_bomb_of_processes_stops_at_the_limit(sandbox: Sandbox, kind: str) -> None:
    finished = sandbox.run(SLEEPERS.replace("{kind}", kind))
    assert finished.outcome == "processes", finished
    # Outside of namespaces, and without a user of the program's own, all of the user's processes
    # are counted together, and the supervisor ends who has too many.
    if not sandbox.contained and spare_user() == os.geteuid():
        assert finished.stdout != b"100\n"
    else:
        assert int(finished.stdout) == LIMITS.processes - 1


CHILDREN = """
import mmap
for _ in range(6):
    if os.fork() == 0:
        x = {memory}
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(6000)
time.sleep(6000)
"""
LOOPS_IN_CHILDREN = """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.02
        while time.process_time() < end: pass
        os._exit(0)
    os.wait()
"""
SLEEP = """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(6000)
"""
FILES = """
held = []
os.mkdir("blind", 0o300)
for i in range(12):
    held.append(open({name}, 'wb', buffering=0))
    {then}
    held[-1].write(bytes(1 << 18))
time.sleep(6000)
"""
FORKS = """
while True:
    try: os.fork()
    except OSError: pass
"""
LIMITED: dict[str, tuple[str, dict[str, float | None], str]] = {
    "forks without end": (FORKS, {"wall_s": 0.3, "cpu_s": None}, "time processes"),
    "one allocation": ("x = bytearray(1 << 30)", {}, "memory"),
    "private memory": (CHILDREN.replace("{memory}", "bytearray(50 << 20)"), {}, "memory"),
    "shared memory": (CHILDREN.replace("{memory}", "mmap.mmap(-1, 50 << 20)"), {}, "memory"),
    "an endless loop": ("while True: pass", {"cpu_s": 0.1}, "cpu"),
    "loops in children": (LOOPS_IN_CHILDREN, {"cpu_s": 0.2}, "cpu"),
    "a sleep": (SLEEP, {"wall_s": 0.3}, "time"),
    "endless output": ("while True: os.write(1, b'x' * 5000)", {}, "output"),
    "endless errors": ("while True: os.write(2, b'x' * 5000)", {}, "output"),
    "a large file": ("open('big', 'wb').write(bytes(64 << 20))", {}, "files"),
    "many files": (FILES.format(name="str(i)", then="pass"), {}, "files"),
    "removed files": (FILES.format(name="str(i)", then="os.unlink(str(i))"), {}, "files"),
    "files out of sight": (FILES.format(name="f'blind/{i}'", then="pass"), {}, "files"),
    "countless files": (
        "for i in range(5000): open(str(i), 'w').close()\ntime.sleep(6000)",
        *({}, "files"),
    ),
    "a crash": ("ctypes.string_at(0)", {}, "signal"),
}
"""Program, limits that differ, and the outcomes that may be."""


@pytest.mark.parametrize("what", LIMITED)
def test_what_takes_without_end_meets_its_limit(sandbox: Sandbox, what: str) -> None:
    source, limits, allowed = LIMITED[what]
    finished = sandbox.run(source, limits=replace(LIMITS, **limits))
    assert finished.outcome in allowed.split(), finished
    assert finished.outcome != "signal" or finished.code == -signal.SIGSEGV
    assert len(finished.stdout) + len(finished.stderr) <= LIMITS.output_bytes
    assert finished.peak_bytes < LIMITS.processes * LIMITS.memory_bytes


def test_children_that_share_their_memory_are_not_counted_twice(sandbox: Sandbox) -> None:
    source = """
x = bytearray(os.urandom(1 << 20) * 50)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
for _ in range(5): os.wait()
print("done")
"""
    assert sandbox.run(source).stdout == b"done\n"


def test_many_at_a_time_do_not_get_in_each_others_way(sandbox: Sandbox) -> None:
    source = f"""
import threading
threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range({LIMITS.processes - 1})]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
"""
    command, given = sandbox.command(source), {"mechanisms": sandbox.mechanisms}
    with sandbox.unchanged(), ThreadPoolExecutor(10) as pool:
        runs = [pool.submit(run, command, limits=LIMITS, **given) for _ in range(20)]
        ends = [future.result() for future in runs]
    assert {end.stdout for end in ends} == {b"done\n"}, [end for end in ends if not end.ok]


# -- Who is left -----------------------------------------------------------------------------------

ESCAPEES = """
for _ in range(3):
    if os.fork() == 0:
        for leave in (os.setsid, lambda: os.setpgid(0, 0)):
            try: leave()
            except OSError: pass
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            time.sleep(6000)
        os._exit(0)
print("up", flush=True)
"""


@pytest.mark.parametrize("how", ["by itself", "kill", "death of the supervisor"])
def test_every_descendant_ends_with_the_program(sandbox: Sandbox, how: str) -> None:
    if how == "by itself":
        assert sandbox.run(ESCAPEES).ok  # and no process is left
        return
    with sandbox.unchanged():
        process = sandbox.start(f"{ESCAPEES}\ntime.sleep(6000)")
        assert process.stdout.readline() == b"up\n"
        sandbox.until_running(4)
        # the kernel short of memory takes the program first
        scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in sandbox.processes()]
        assert set(scores) == {"1000\n"}
        if how != "kill":
            os.kill(process.pid, signal.SIGKILL)
            sandbox.until_gone()
        assert process.kill().outcome == "killed"


def test_the_parents_death_takes_every_descendant(sandbox: Sandbox) -> None:
    source = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from sampler.sandbox import Limits, start
process = start(sys.argv[1:], limits=Limits(wall_s=None, cpu_s=None),
                mechanisms={list(sandbox.mechanisms)!r})
print(process.stdout.readline().decode(), end="", flush=True)
process.wait(None)
"""
    command = [sys.executable, "-c", source, *sandbox.command(f"{ESCAPEES}\ntime.sleep(6000)")]
    environment = {**os.environ, "TMPDIR": str(sandbox.directory)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout and parent.stdout.readline() == b"up\n"
        sandbox.until_running(5)
        parent.kill()
    sandbox.until_gone()
    eventually(lambda: not list(sandbox.directory.iterdir()), "the scratch directory's end")


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({"/": 0o755, "/a": 0o711, "/a/f": 0o644}, True),
        ({"/": 0o755, "/a": 0o755, "/a/f": 0o640}, False),
        ({"/": 0o755, "/a": 0o750, "/a/f": 0o644}, False),
        ({"/": 0o750, "/a": 0o755, "/a/f": 0o644}, False),
    ],
    ids=["open", "a closed file", "a closed folder above it", "a closed root"],
)
def test_a_path_is_open_to_all_if_each_folder_above_it_is(
    monkeypatch: pytest.MonkeyPatch, modes: dict[str, int], expected: bool
) -> None:
    def stat(path: bytes) -> SimpleNamespace:
        return SimpleNamespace(st_mode=modes[path.decode()])

    with monkeypatch.context() as patch:
        patch.setattr("sampler.sandbox.process.os.stat", stat)
        found = open_to_all([b"/a/f"])
    assert found is expected


def test_all_this_holds_for_an_ordinary_user() -> None:
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root, and an interpreter that everybody can reach")
    packages = Path(pytest.__file__).parents[1]
    if not open_to_all([bytes(packages), bytes(ROOT)]):
        pytest.skip("needs a checkout that everybody can read")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={directory}/base"]
        environment = {"PYTHONPATH": f"{ROOT}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"HOME": directory, "TMPDIR": directory, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [python, *options, str(Path(__file__).relative_to(ROOT))],
            cwd=ROOT,
            env=environment,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
