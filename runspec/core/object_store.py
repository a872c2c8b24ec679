"""Folders of an object store (s3://, gs://), read and written by TensorStore's drivers.

An object store has no rename. So an entry `<folder>/<name>/...` becomes valid by a marker, the
object `<folder>/whole/<name>`, which is written last and removed first. An entry without a marker
is unfinished: it is not listed, and its writer removes it at the next start.

Credentials and endpoints come from the environment: for s3:// AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL; for gs:// GOOGLE_APPLICATION_CREDENTIALS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.entry_points import install_command
from runspec.core.errors import UserError

DEADLINE_S = 60.0
"""Seconds that one small request may take, with its retries."""
RETRIES: dict[str, int | str] = {"max_retries": 5, "initial_delay": "200ms", "max_delay": "2s"}
_DRIVERS = {"s3": "s3", "gs": "gcs"}
_MARKERS = "whole"
_REMEDY = (
    "see that the bucket exists and that this machine reaches the store; endpoint, region and "
    "credentials come from the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS)"
)


@dataclass(frozen=True)
class ObjectPath:
    """Folder or object of a store; methods like those of pathlib have the same names.

    Methods that use the store raise a UserError if it fails.
    """

    url: str
    """scheme://bucket/key, without a final slash."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.url.rpartition("/")[0])

    @property
    def marker(self) -> ObjectPath:
        """Object that makes this entry of its folder valid."""
        return self.parent / _MARKERS / self.name

    def kvstore(self, end: str = "/") -> dict[str, Any]:
        """Returns TensorStore's spec of the keys that begin with this path and `end`."""
        scheme, _, path = self.url.partition("://")
        bucket, _, key = path.partition("/")
        driver = _DRIVERS[scheme]
        spec = {"driver": driver, "bucket": bucket, "path": f"{key}{end}"}
        context: dict[str, Any] = {f"{driver}_request_retries": RETRIES}
        if driver == "s3":
            env = os.environ
            found = {
                "endpoint": env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"),
                "aws_region": env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
            }
            spec |= {name: value for name, value in found.items() if value}
            if "AWS_ACCESS_KEY_ID" in env:  # else TensorStore reads files and the machine's role
                context["aws_credentials"] = {"type": "environment"}
        return {**spec, "context": context}

    def exists(self) -> bool:
        """Return whether an object of this exact name exists."""
        with self._store("") as store:
            return store.read("").result(timeout=DEADLINE_S).state == "value"

    def read(self, max_bytes: int) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: it does not exist.
            UserError: it is larger than `max_bytes`.
        """
        with self._store("") as store:
            found = store.read("").result(timeout=DEADLINE_S)
        if found.state != "value":
            raise FileNotFoundError(str(self))
        if len(found.value) > max_bytes:
            raise UserError(f"larger than the {max_bytes} bytes allowed", place=str(self))
        return found.value

    def write(self, data: bytes) -> None:
        """Write an object atomically."""
        with self._store("") as store:
            store.write("", data).result(timeout=DEADLINE_S)

    def unlink(self) -> None:
        """Remove an object if it exists."""
        with self._store("") as store:
            store.write("", None).result(timeout=DEADLINE_S)

    def names(self) -> list[str]:
        """Return the names of all objects below this folder, relative to it."""
        with self._store() as store:
            return [key.decode() for key in store.list().result(timeout=DEADLINE_S)]

    def entries(self) -> list[str]:
        """Return the names of the valid entries of this folder."""
        return (self / _MARKERS).names()

    def unfinished(self) -> list[str]:
        """Return the names of the entries of this folder without a marker."""
        found = {name.partition("/")[0] for name in self.names()}
        return sorted(found - {_MARKERS, *self.entries()})

    def remove(self) -> None:
        """Remove an entry with everything in it, its marker first."""
        self.marker.unlink()
        with self._store() as store:
            store.delete_range(type(store).KeyRange()).result()

    @contextmanager
    def _store(self, end: str = "/") -> Iterator[Any]:
        try:
            import tensorstore as ts
        except ImportError as error:
            raise UserError(
                f"the package tensorstore, which reads and writes {self}, is not installed",
                place="checkpoints.dir",
                remedy=install_command("bridge"),
            ) from error
        try:
            yield ts.KvStore.open(self.kvstore(end)).result(timeout=DEADLINE_S)
        except (ValueError, TimeoutError) as error:  # TensorStore's errors
            reason = str(error).partition("[")[0] or f"no answer in {DEADLINE_S:.0f} s"
            raise UserError(
                f"the object store fails at {self}: {reason[:300].strip()}",
                place="checkpoints.dir",
                remedy=_REMEDY,
            ) from error


Folder = Path | ObjectPath


def last_file(entry: Folder, name: str) -> Folder:
    """Return the path of an entry's last file, which makes it valid; on a disk `name` in it."""
    return entry.marker if isinstance(entry, ObjectPath) else entry / name


def folder_at(text: str) -> Folder:
    """Return the folder that a path or a URL names.

    Raises:
        UserError: a URL of another scheme, or without a bucket.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        return Path(text)
    if scheme not in _DRIVERS or not rest.partition("/")[0]:
        raise UserError(
            f"{text!r} is no folder of an object store",
            place="checkpoints.dir",
            remedy="write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a path",
        )
    return ObjectPath(text.rstrip("/"))
