"""What strangers could read, forge or take."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.pools import is_elsewhere, untrusted_pools
from runspec.lint.registry import Context, Violation, rule
from runspec.lint.secrets import secret_kind
from runspec.lint.urls import is_loopback, parse_url, server_urls


@rule("plain-http", "security")
def plain_http(context: Context) -> Iterator[Violation]:
    """Servers that an untrusted pool fetches from must be asked over HTTPS.

        url = https://..., or its host is this machine

    Chunks are checked against signed manifests, so nobody on the way can change them unseen. But
    with plain HTTP everybody on the way can read the weights, withhold the newest version from one
    worker alone, and see who asks. Loopback addresses never leave the machine: servers that are
    started here listen there, and what strangers reach is a proxy before them that speaks TLS, of
    which `placement.url`, `broadcast.origin.url` and a relay's `url` give the address.
    """
    pools = untrusted_pools(context.spec)
    for where, text in server_urls(context.spec).items():
        url = parse_url(text)
        if pools and url is not None and url.scheme == "http" and not is_loopback(url.host):
            yield Violation(
                (*where, "url"),
                f"{url.shown} is plain HTTP, and pool {pools[0].name} is untrusted",
                suggestion="https:// for a server elsewhere; one that is started here listens on "
                "127.0.0.1, behind a proxy with TLS",
            )


@rule("public-address", "security")
def public_address(context: Context) -> Iterator[Violation]:
    """What strangers must reach has a public address.

        placement.url and broadcast.origin.url are given, where an untrusted pool is elsewhere

    The coordinator is what a worker registers with: join links name `placement.url`. The origin is
    what relays elsewhere fetch from, and workers once no relay answers. Null leaves both at an
    address of this machine, without TLS. The pool is elsewhere as for `unsigned-weights`; one on
    CPUs is taken for a rehearsal.
    """
    spec = context.spec
    pools = [pool for pool in untrusted_pools(spec) if is_elsewhere(pool, spec)]
    elsewhere = [pool.name for pool in pools if pool.hardware.kind != "cpu"]
    urls = {("placement",): spec.placement.url, ("broadcast", "origin"): spec.broadcast.origin.url}
    for where, url in urls.items():
        if url is None and elsewhere:
            yield Violation(
                (*where, "url"),
                f"is null, and pool {elsewhere[0]} is untrusted and on other machines",
                suggestion="the https:// address of a proxy before it (docs/public-runs.md)",
            )


@rule("unsigned-weights", "security")
def unsigned_weights(context: Context) -> Iterator[Violation]:
    """Workers on other machines must know the root key that weights are signed under.

        identity.root_public_key is given, where an untrusted pool is elsewhere

    Everyone pins the root's public key: it signs roles.json, which names the publisher's key, which
    signs every manifest (docs/broadcast.md). Null lets the local backend make a throw-away root
    on this machine, which a stranger has no way to know: whatever a relay sends would have to be
    believed. A pool is taken to be elsewhere where `placement.roles` leaves it out or, without
    `placement.roles`, where its hardware is an accelerator.
    """
    spec = context.spec
    elsewhere = [pool.name for pool in untrusted_pools(spec) if is_elsewhere(pool, spec)]
    if spec.identity.root_public_key is None and elsewhere:
        yield Violation(
            ("identity", "root_public_key"),
            f"is null, and pool {elsewhere[0]} is untrusted and on other machines: it could not "
            "tell these weights from another's",
            suggestion="give the root's public key, or let `runspec prepare` make one; a pool that "
            "does run here belongs into placement.roles",
        )


@rule("inline-secret", "security")
def inline_secret(context: Context) -> Iterator[Violation]:
    """A secret must be named under `secrets`, never written into a spec.

    A spec is in git, in pull requests, in spec.json of every run and with every worker. What is
    looked for are texts that have the published form of a credential (tokens of Hugging Face,
    GitHub, GitLab, Slack, OpenAI and Anthropic, AWS and Google keys, JSON web tokens, private keys
    in PEM), URLs with user:password@, and long random texts under keys like token or password in
    `data.sources[].params`. The finding does not quote them.
    """
    for location, text in _texts(context.spec.model_dump(mode="python", by_alias=True)):
        kind = secret_kind(text, key=_free_key(location))
        if kind:
            yield Violation(
                location,
                f"holds what looks like {kind}",
                suggestion="take it out, revoke it, and name its environment variable under "
                "secrets",
                secret=True,
            )


def _texts(
    value: object, location: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every text of a spec with its location; items of named lists by name."""
    if isinstance(value, str):
        yield location, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*location, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            name = inner.get("name", index) if isinstance(inner, dict) else index
            yield from _texts(inner, (*location, name))


def _free_key(location: tuple[str | int, ...]) -> str:
    """The key where the spec leaves its meaning to others; empty elsewhere."""
    return str(location[-1]) if "params" in location[:-1] else ""
