"""Findings of an audit, and the keys whose signatures it accepts, before and after a rollback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.roles import MAX_BYTES, Roles, issued_at, open_roles
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature, SigningKey

_LONGEST = 200
"""Characters of a found or expected value; a ledger may hold anything."""


@dataclass(frozen=True)
class Finding:
    row: int | None
    """Row of the ledger; None if the finding is about no row."""
    what: str
    """The check, in a word or two (docs/audit.md lists them)."""
    found: str
    expected: str

    def __str__(self) -> str:
        where = "no row" if self.row is None else f"row {self.row}"
        return f"{where}: {self.what}: {self.found}; expected {self.expected}"


@dataclass(frozen=True)
class Credit:
    """Credit of a worker by the ledger."""

    rollouts: int = 0
    tokens: int = 0


@dataclass
class Report:
    """The outcome of an audit; filled while it runs."""

    rows: int = 0
    head: str = ""
    """Chain of the last row."""
    anchored_rows: int = 0
    """Rows that the newest manifest's signature covers."""
    steps_closed: int = 0
    files_read: int = 0
    """Files of submissions and verdicts, envelopes included."""
    files_gone: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    credits: dict[str, Credit] = field(default_factory=dict)

    def add(self, row: int | None, what: str, found: object, expected: object) -> None:
        self.findings.append(Finding(row, what, _short(found), _short(expected)))

    def require(
        self, holds: bool, row: int | None, what: str, found: object, expected: object
    ) -> bool:
        """Add a finding unless `holds`; return `holds`."""
        if not holds:
            self.add(row, what, found, expected)
        return holds

    def lines(self) -> Iterator[str]:
        """Return the report as text; characters that cannot be printed are replaced."""
        return ("".join(c if c.isprintable() else "?" for c in line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.rows} rows, {self.steps_closed} steps closed, "
            f"{self.anchored_rows} rows under a signed manifest; head {self.rows}:{self.head}"
        )
        yield f"{self.files_read} files read, {self.files_gone} gone"
        yield from (f"note: {note}" for note in self.notes)
        for worker, credit in sorted(self.credits.items()):
            yield f"worker {worker}: {credit.rollouts} rollouts, {credit.tokens} tokens"
        yield from (f"FINDING {finding}" for finding in self.findings)
        count = len(self.findings)
        yield "clean" if not count else f"{count} finding{'s' * (count > 1)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def read_roles(run_dir: Path, spec: RunSpec, root_key: str | None, report: Report) -> Roles:
    """Return the run's roles.json, verified by the root key, whether or not it has expired.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        root_key: public, hex; None: the spec's, or the run's own root in `keys/`.
        report: gets a note if the root is the run's own.

    Raises:
        UserError: there is no root key, or roles.json is not signed by it.
    """
    path = run_dir / "keys" / "roles.json"
    root = root_key or spec.identity.root_public_key
    if root is None:
        own = run_dir / "keys" / "root.key"
        if not own.exists():
            raise UserError(
                "no root key: the spec pins none, and the run made none",
                place=str(own),
                remedy="give it with --root-key HEX",
            )
        root = SigningKey.load(own).public_hex
        report.notes.append(
            "the root key is the run directory's own: its owner could have signed anything"
        )
    try:
        data = read_bounded(path, MAX_BYTES)
        # A run may be audited long after its roles expired, so they are checked as of their issue.
        return open_roles(data, root_public_key=root, run=spec.name, now=issued_at(data))
    except (OSError, BadSignature) as error:
        raise UserError(
            f"cannot be verified: {error}",
            place=str(path),
            remedy="give the root's public key with --root-key",
        ) from error


@dataclass
class Signers:
    """Keys that may sign the documents of the rows between two rollbacks.

    Before the last rollback the run had other keys, which roles.json does not name. Documents of
    that time must all be signed by one coordinator, which is none of the current ones. The same
    holds for each learner island.
    """

    roles: Roles
    current: bool
    """Whether no rollback follows."""
    _earlier: dict[str, str] = field(default_factory=dict)
    """Keys of that time: the coordinator's under an empty name, the islands' under theirs."""

    def coordinators(self, document: bytes) -> frozenset[str]:
        """Return the keys that may have signed a lease or a batch."""
        if self.current:
            return self.roles.coordinator
        key = self._earlier_key("", document)
        return frozenset(() if key is None else (key,)) - self.roles.coordinator

    def islands(self, name: str, document: bytes) -> dict[str, str]:
        """Return the key that may have signed an island's offer, by the island's name."""
        keys = self.roles.islands
        if self.current:
            return {name: keys[name]} if name in keys else {}
        key = self._earlier_key(name, document)
        return {} if key is None or key in keys.values() else {name: key}

    def _earlier_key(self, name: str, document: bytes) -> str | None:
        """Return the key of the first document under a name; None if that has none."""
        if name not in self._earlier:
            with suppress(MalformedJson):
                key = parse_object(document, max_bytes=len(document)).get("key")
                if isinstance(key, str):
                    self._earlier[name] = key
        return self._earlier.get(name)
