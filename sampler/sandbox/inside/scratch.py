"""Taking away a scratch directory that a hostile program has filled."""

from __future__ import annotations

import os


def remove(path: bytes) -> None:
    """Removes a directory whose writers are all dead: any depth, any permissions; symbolic links
    are removed and never followed.

    Directories are moved up before they are emptied, so that no path grows with the depth.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # somebody else was first
    try:
        _empty(top)
        os.rmdir(path)
    finally:
        os.close(top)


def _empty(top: int) -> None:
    moved = 0
    while names := os.listdir(top):
        for name in names:
            if not _is_directory(name, top):
                os.unlink(name, dir_fd=top)
                continue
            os.chmod(name, 0o700, dir_fd=top)
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for inner in os.listdir(child):
                    if not _is_directory(inner, child):
                        os.unlink(inner, dir_fd=child)
                        continue
                    os.chmod(inner, 0o700, dir_fd=child)  # moving one writes its `..`
                    moved += 1
                    target = f".moved-{moved}"
                    while _exists(target, top):
                        moved += 1
                        target = f".moved-{moved}"
                    os.rename(inner, target, src_dir_fd=child, dst_dir_fd=top)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=top)


def _is_directory(name: str, directory: int) -> bool:
    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    return mode & 0o170000 == 0o040000


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
