"""What a model's program tries in order to get out of the sandbox, with each set of mechanisms:
network, other processes, the kernel.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.attacks.sandboxed import Sandbox, refused

CANARY = "hush-90b2f1c6de"


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
        if not sandbox.filtered:  # knows no namespaces: `probe` asks for the filter where it is
            attempts.pop("vsock")
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
    attempt(name + "-queue", lambda: call(129, 138, pid, 0, (ctypes.c_int * 32)(0, 0, -1)))
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
