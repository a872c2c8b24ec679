"""Which files an isolated program may read: the interpreter, its libraries, and what is asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_SYSTEM = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/nix/store"]
_MAX_LINKS = 40


@cache
def interpreter() -> tuple[Path, ...]:
    """What this interpreter needs to start, its standard library among it: no site-packages of a
    virtual environment."""
    wanted = [sys.executable, f"{sys.prefix}/pyvenv.cfg", f"{sys.base_prefix}/lib", *_SYSTEM]
    return tuple(Path(path) for path in wanted if os.path.exists(path))


def resolve(paths: Iterable[Path]) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Real paths without those below others, and the symbolic links (path, target) on the way.

    Args:
        paths: files and directories, absolute.

    Raises:
        FileNotFoundError: one is not there, or its links lead round in a circle.
    """
    links: dict[str, str] = {}
    real = sorted({_follow(os.path.abspath(path), links) for path in paths})
    kept: list[str] = []
    for path in real:
        if not kept or not path.startswith(kept[-1].rstrip("/") + "/"):
            kept.append(path)
    below = tuple(path + "/" for path in kept)
    rows = [(path, target) for path, target in links.items() if not path.startswith(below)]
    return [os.fsencode(p) for p in kept], [(os.fsencode(p), os.fsencode(t)) for p, t in rows]


def _follow(path: str, links: dict[str, str]) -> str:
    """The real path; notes each link that is on the way."""
    for _ in range(_MAX_LINKS):
        done = ""
        parts = path.strip("/").split("/")
        for index, part in enumerate(parts):
            done += f"/{part}"
            if os.path.islink(done):
                links[done] = target = os.readlink(done)
                rest = "/".join(parts[index + 1 :])
                path = os.path.normpath(os.path.join(os.path.dirname(done), target, rest))
                break
        else:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is not there")
            return path
    raise FileNotFoundError(f"{path}: too many symbolic links")


def open_to_all(paths: Iterable[bytes]) -> bool:
    """Whether any user may reach and read these."""
    for path in paths:
        if not os.stat(path).st_mode & 0o004:
            return False
        while path := os.path.dirname(path):
            if not os.stat(path).st_mode & 0o001:
                return False
            if path == b"/":
                break
    return True
