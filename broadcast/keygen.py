"""Keys of a run: the root, the roles that it names, and the signed roles.json."""

from __future__ import annotations

from pathlib import Path

from runspec.common.errors import UserError
from runspec.common.files import write_atomic
from runspec.common.keys import SigningKey
from runspec.common.roles import sign_roles

VALID_S = 365 * 86400.0


def make_keys(directory: Path, *, run: str, validators: int = 1, valid_s: float = VALID_S) -> str:
    """Makes root.key, publisher.key, coordinator.key, validator-<i>.key, root.pub and roles.json.

    Args:
        directory: where they go; keys that are there are not overwritten.
        run: the run that roles.json is for.
        validators: how many validator keys.
        valid_s: seconds until roles.json expires.

    Returns:
        The root's public key, which everyone pins.

    Raises:
        UserError: there are keys already.
    """
    root = SigningKey.generate()
    named: dict[str, list[str]] = {"publisher": [], "coordinator": [], "validator": []}
    files = [("root", root)]
    for role, name in [
        ("publisher", "publisher"),
        ("coordinator", "coordinator"),
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
            remedy="name a new directory, or remove the old keys",
        )
    for name, key in files:
        key.save(directory / f"{name}.key")
    write_atomic(directory / "root.pub", f"{root.public_hex}\n".encode())
    write_atomic(directory / "roles.json", sign_roles(run, named, root, valid_s=valid_s))
    return root.public_hex
