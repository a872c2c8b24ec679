"""A run's part of a store: paths, on disk and below a URL, the lock of its writer, and its keys.

The keys of a run are made and renewed here, and a roles.json is checked before it is published. The
check does not concern its signature: the clients pin the root's key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from runspec.core import files
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.roles import KIND, MAX_BYTES, Signers, issued_at, open_roles, sign_roles
from runspec.core.signed import BadSignature, SigningKey, open_document

TENSORS_NAME = "tensors.json"
"""File of a version that lists its tensors and their digests."""
MAX_VERSION = 2**31
RUN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}(?:\.data|\.states)?")
"""Form of a run's id: the run spec's `name`, or `data_run` or `states_run` of it."""


def is_run(text: object) -> bool:
    """Return whether `text` is a run's id, and so is safe as a folder name."""
    return isinstance(text, str) and RUN.fullmatch(text) is not None


def data_run(run: str) -> str:
    """Return the id under which the files of a run's problems are published."""
    return f"{run}.data"


def states_run(run: str) -> str:
    """Return the id under which full states of a run's learner are published."""
    return f"{run}.states"


def roles_run(run: str) -> str:
    """Return the run whose roles.json is that of an id."""
    return run.removesuffix(".data").removesuffix(".states")


def is_version(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_VERSION


def roles_name(run: str) -> str:
    return f"{run}/roles.json"


def latest_name(run: str) -> str:
    return f"{run}/latest.json"


def manifest_name(run: str, version: int) -> str:
    return f"{run}/versions/{version}/manifest.json"


def chunks_name(run: str) -> str:
    return f"{run}/chunks"


def chunk_name(run: str, digest: str) -> str:
    return f"{chunks_name(run)}/{digest}"


def stored_versions(store: Path, run: str) -> list[int]:
    """Return the versions whose manifest is in a store, in ascending order."""
    found = (path.parent.name for path in store.glob(f"{run}/versions/*/manifest.json"))
    return sorted(int(name) for name in found if name.isdecimal())


def locked(store: Path, run: str, deadline_s: float) -> AbstractContextManager[None]:
    """Hold the write lock of a run's part of a store: one publisher, or one relay.

    The lock excludes every other process; a killed process releases it.

    Args:
        store: the store's directory.
        run: the run's id.
        deadline_s: seconds to wait for another holder; the thread sleeps.

    Raises:
        UserError: another process still holds it.
    """
    folder = store / run
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = files.open_folder_lock(folder)
    held = UserError(
        f"another publisher or relay has held this store for {deadline_s:g} s",
        place=str(folder),
        remedy="let one process publish a run, and give each relay its own folder",
    )
    return files.locked(descriptor, deadline_s, held)


VALID_S = 365 * 86400.0
_ROOT, _ROLES = "root.key", "roles.json"
_SINGLE = ("publisher", "coordinator", "evaluator")
"""Roles with one key."""


def make_keys(directory: Path, *, run: str, validators: int = 1) -> str:
    """Make the keys of the root, of the roles and of so many validators, and roles.json.

    Args:
        directory: gets the files; existing keys are not overwritten.
        run: id of the run that roles.json is for.
        validators: number of validator keys.

    Returns:
        The root's public key, which everyone pins.

    Raises:
        UserError: there are keys already.
    """
    root = SigningKey.generate()
    named: dict[str, list[str]] = {role: [] for role in (*_SINGLE, "validator")}
    files = [("root", root)]
    for role, name in [
        *((role, role) for role in _SINGLE),
        *(("validator", f"validator-{i}") for i in range(validators)),
    ]:
        key = SigningKey.generate()
        named[role].append(key.public_hex)
        files.append((name, key))
    existing = [name for name, _ in files if (directory / f"{name}.key").exists()]
    if existing:
        raise UserError(
            f"{existing[0]}.key exists already",
            place=str(directory),
            remedy="name a new directory, or renew single keys with --renew",
        )
    for name, key in files:
        key.save(directory / f"{name}.key")
    write_atomic(directory / "root.pub", f"{root.public_hex}\n".encode())
    write_atomic(directory / _ROLES, sign_roles(run, named, root, valid_s=VALID_S))
    return root.public_hex


def renew_keys(directory: Path, names: Sequence[str]) -> None:
    """Replace role keys and sign a newer roles.json, which revokes the old keys.

    The publisher's next `publish` puts the new roles.json into the store, from where everyone gets
    it. From then on versions that a revoked publisher's key signed are refused, so the next version
    must be an anchor.

    Args:
        directory: directory of `make_keys`; only root.key and roles.json must still be there.
        names: the keys to replace: `publisher`, `coordinator`, `evaluator`, `validator-<i>`.
            Without names, roles.json is only signed again, to expire later.

    Raises:
        UserError: root.key or its roles.json is missing, or there is no key of that name.
    """
    root = SigningKey.load(directory / _ROOT)
    path = directory / _ROLES
    try:
        data = read_bounded(path, MAX_BYTES)
        # An expired one is accepted, because renewal mends that.
        payload = open_document(
            data, kind=KIND, keys={root.public_hex}, max_bytes=MAX_BYTES
        ).payload
    except (OSError, BadSignature) as error:
        raise UserError(
            f"cannot be renewed: {error}", place=str(path), remedy="put back the newest roles.json"
        ) from error
    named: dict[str, list[str]] = payload["roles"]
    places = {role: (role, 0) for role in _SINGLE if named.get(role)}
    places |= {f"validator-{i}": ("validator", i) for i in range(len(named["validator"]))}
    new = {name: SigningKey.generate() for name in names}
    for name, key in new.items():
        if name not in places:
            raise UserError(f"there is no key {name!r}", place=str(path))
        role, index = places[name]
        named[role][index] = key.public_hex
    for name, key in new.items():
        waiting = directory / f"{name}.new"
        waiting.unlink(missing_ok=True)  # left by an interrupted renewal
        key.save(waiting)
    issued = max(time.time(), payload["issued"] + 1.0)  # later, even if the clock went back
    roles = sign_roles(
        payload["run"],
        named,
        root,
        valid_s=VALID_S,
        now=issued,
        islands=payload.get("islands"),
    )
    write_atomic(path, roles)
    for name in new:
        (directory / f"{name}.new").rename(directory / f"{name}.key")


def signers_of(
    roles: bytes, run: str, key: SigningKey, who: Signers = "publisher"
) -> frozenset[str]:
    """Return the signers' keys in a roles.json; refuse what every client would refuse later.

    Raises:
        UserError: `key` is none of them, or the document is malformed or of another run.
    """
    try:
        keys = open_roles(
            roles, root_public_key=None, run=roles_run(run), now=issued_at(roles)
        ).signers(who)
    except BadSignature as error:
        raise _unreadable(error) from error
    if key.public_hex not in keys:
        raise UserError(
            f"roles.json does not name {key.public_hex[:16]} as {who} of run {run!r}",
            remedy="publish with a key that it names, or sign a roles.json that names this one",
        )
    return keys


def check_newest(path: Path, roles: bytes) -> None:
    """Refuse a roles.json older than the one at `path`: new clients would trust a revoked key."""
    try:
        given = issued_at(roles)
    except BadSignature as error:
        raise _unreadable(error) from error
    try:
        stored = issued_at(read_bounded(path, MAX_BYTES))
    except (FileNotFoundError, BadSignature, UserError):  # a damaged one may be replaced
        return
    if given < stored:
        raise UserError(
            "this roles.json is newer than the one to publish with",
            place=str(path),
            remedy="put the newest roles.json beside the key",
        )


def _unreadable(error: BadSignature) -> UserError:
    return UserError(f"cannot read roles.json: {error}", remedy="sign a new one")
