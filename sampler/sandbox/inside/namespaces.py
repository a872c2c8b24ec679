"""Namespaces, and a root file system of read-only mounts.

The child is cloned into new user, PID, network, mount, IPC and UTS namespaces. It builds its root
on a small tmpfs. The readable trees are mounted read-only at their own paths, /scratch is a second
tmpfs with a limit, and there are a few harmless devices, but no /proc and no /sys. Mounts need
Linux 5.12.
"""

from __future__ import annotations

import ctypes
import os

from . import kernel

FLAGS = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS."""
INSIDE_ID = 1000
"""User and group of the isolated program, as it sees them."""
SCRATCH = b"/scratch"
_NAME = b"sandbox"
DEVICES = [b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom"]
_BUILD_AT = b"/proc"
"""Mount point of the new root until it becomes the root; every Linux has this directory."""
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_AT_EMPTY_PATH, _AT_RECURSIVE, _AT_FDCWD = 0x1000, 0x8000, -100
_OPEN_TREE_CLONE, _MOVE_EMPTY_PATH = 1, 4
_MAX_FILES = 4096


def map_ids(child: int, outside: int, group: int) -> None:
    """Map the child's user and group to ids outside of the namespace; the parent calls this."""
    if os.geteuid() != 0:  # required of an ordinary user to map its group
        with open(f"/proc/{child}/setgroups", "w") as file:
            file.write("deny")
    for name, number in (("uid_map", outside), ("gid_map", group)):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{INSIDE_ID} {number} 1")


def build(readable: list[bytes], links: list[tuple[bytes, bytes]], scratch_bytes: int) -> None:
    """Turn the newly cloned process into user INSIDE_ID with a root file system of its own.

    Args:
        readable: real paths of files and directories, none below another.
        links: (path, target) of symbolic links to create besides them.
        scratch_bytes: capacity of /scratch.

    Raises:
        OSError: a path cannot be read here, or the kernel refuses a mount.
    """
    kernel.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, b"")
    # Before the change of user, because only the old user may reach some of these paths.
    trees = [(path, _tree(path, _RDONLY | _NOSUID | _NODEV)) for path in readable]
    trees += [(path, _tree(path, _NOSUID | _NOEXEC)) for path in DEVICES if os.path.exists(path)]
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "allow":
            os.setgroups([])
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    _no_more_namespaces()
    flags = _MS_NOSUID | _MS_NODEV
    kernel.mount(b"tmpfs", _BUILD_AT, b"tmpfs", flags, b"size=1m,nr_inodes=4k,mode=0755")
    os.chdir(_BUILD_AT)
    for path, tree in trees:
        _place(tree, path[1:])
    os.mkdir(SCRATCH[1:])
    size = b"size=%d,nr_inodes=%d,mode=0755" % (scratch_bytes, _MAX_FILES)
    kernel.mount(b"tmpfs", SCRATCH[1:], b"tmpfs", flags, size)
    shared = [(b"/tmp", SCRATCH), (b"/dev/shm", SCRATCH)]
    for path, target in [*links, *shared]:
        os.makedirs(os.path.dirname(path[1:]) or b".", exist_ok=True)
        if not os.path.lexists(path[1:]):
            os.symlink(target, path[1:])
    kernel.call("changing the root", kernel.NR_PIVOT_ROOT, b".", b".")
    kernel.detach(b".")
    os.chdir(b"/")
    _set_attributes(os.open(b"/", os.O_PATH | os.O_CLOEXEC), _RDONLY, 0)
    kernel.call("naming the machine", kernel.NR_SETHOSTNAME, _NAME, len(_NAME))


def _tree(path: bytes, attributes: int) -> int:
    """Return a detached copy of the mount of a path, with these attributes throughout."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    what = f"mounting {os.fsdecode(path)}"
    tree = kernel.call(what, kernel.NR_OPEN_TREE, _AT_FDCWD, path, flags)
    _set_attributes(tree, attributes, _AT_RECURSIVE)
    return tree


def _set_attributes(tree: int, attributes: int, flags: int) -> None:
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    kernel.call(
        "read-only mounts",
        kernel.NR_MOUNT_SETATTR,
        tree,
        b"",
        _AT_EMPTY_PATH | flags,
        ctypes.byref(request),
        32,
    )


def _place(tree: int, at: bytes) -> None:
    if os.stat(tree).st_mode & 0o170000 == 0o040000:
        os.makedirs(at, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(at), exist_ok=True)
        os.close(os.open(at, os.O_CREAT | os.O_WRONLY, 0o644))
    what = f"mounting /{os.fsdecode(at)}"
    kernel.call(what, kernel.NR_MOVE_MOUNT, tree, b"", _AT_FDCWD, at, _MOVE_EMPTY_PATH)
    os.close(tree)


def _no_more_namespaces() -> None:
    """Forbid nested user namespaces, which would give the dropped capabilities back."""
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        return  # /proc/sys is read-only in some containers; the filter refuses namespaces too
