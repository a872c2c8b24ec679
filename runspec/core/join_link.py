"""What a volunteer is sent: one link that says where the coordinator is and whom to believe.

    http://HOST:PORT/#run=NAME&root=HEX[&invite=TEXT]

The part behind # never travels to a server. Whoever trusts the sender of the link trusts its root
key; everything else that a run says is signed by keys which that root names.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

from runspec.core.errors import UserError
from runspec.core.hashing import is_digest

_LONGEST = 3000
_FORM = "http://HOST:PORT/#run=NAME&root=HEX"


@dataclass(frozen=True)
class JoinLink:
    """A link taken apart; run and root are None where a plain URL leaves them out."""

    coordinator: str
    """Base URL without a trailing slash."""
    run: str | None = None
    root: str | None = None
    """The root's public key."""
    invite: str | None = None
    """An invitation (`runspec.core.invite`), where the run takes only who has one."""

    def __str__(self) -> str:
        if self.run is None or self.root is None:
            return self.coordinator
        invite = f"&invite={quote(self.invite, safe='')}" if self.invite else ""
        return f"{self.coordinator}/#run={quote(self.run, safe='')}&root={self.root}{invite}"


def parse_join_link(text: str) -> JoinLink:
    """Reads a link, or the plain URL of a coordinator.

    Raises:
        UserError: it is neither.
    """
    if len(text) > _LONGEST:
        raise _no_link(f"a text of {len(text)} characters")
    if not text.isprintable():  # bytes that are no UTF-8 come as what cannot be written again
        raise _no_link(repr(text[:200]))
    try:
        parts = urlsplit(text)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError as error:
        raise _no_link(f"{text[:200]!r}: {str(error)[:200]}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sound:
        raise _no_link(repr(text[:200]))
    if parts.query or parts.username or parts.password:
        raise _no_link(f"{text[:200]!r} with a user or a query")
    said = dict(parse_qsl(parts.fragment))
    if unknown := set(said) - {"run", "root", "invite"}:
        raise _no_link(f"{text[:200]!r} with {', '.join(sorted(unknown))[:80]}")
    root = said.get("root")
    if root is not None and not is_digest(root):
        raise _no_link(f"the root key {root[:80]!r}, which is not 64 hex characters")
    url = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return JoinLink(url.rstrip("/"), said.get("run"), root, said.get("invite"))


def reachable(url: str, link: JoinLink) -> str:
    """An address of another server of the run, as the volunteer reaches it.

    A server that listens everywhere, or on its own machine only, is called by addresses that mean
    nothing elsewhere: then it is looked for on the coordinator's machine.
    """
    parts, here = urlsplit(url), urlsplit(link.coordinator)
    local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    if parts.hostname not in ("0.0.0.0", "::") and not (local and not _is_local(here.hostname)):  # noqa: S104
        return url
    host = here.hostname or ""
    name = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{name}{port}{parts.path}".rstrip("/")


def _is_local(host: str | None) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _no_link(what: str) -> UserError:
    return UserError(
        f"no join link: {what}",
        place="URL",
        remedy=f"a link is {_FORM}; `runspec status RUN` prints it where the run is",
    )
