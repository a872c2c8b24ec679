"""Rules on what others could read, forge or move: servers, weights, credentials, revisions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runspec.core.address import is_loopback, parse_url, server_urls
from runspec.core.schema import RunSpec, SamplerPool
from runspec.lint import Context, Found, Violation, relation, rule
from runspec.lock import COMMIT, is_on_hub

# Prefixes: docs.github.com "About authentication", huggingface.co "User access tokens",
# docs.gitlab.com "Token overview", api.slack.com "Token types", docs.aws.amazon.com "IAM
# identifiers", cloud.google.com "API keys", RFC 7519 (JWT), RFC 7468 (PEM), RFC 3986 (userinfo).
# Repetitions that could begin at many places are bounded: texts may be hostile.
_FORMS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "an API key": r"\bsk-(?:[a-z0-9]{1,12}-){0,3}(?=\w*[0-9])(?=\w*[A-Z])[A-Za-z0-9_]{20,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{35}",
    "a JSON web token": r"\beyJ[\w-]{8,500}\.eyJ[\w-]{8,2000}\.[\w-]{16,}",
    "a private key": r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY-----",
    "a password in a URL": r"\b[a-z][a-z0-9+.-]{1,15}://[^/\s:@]{0,100}:[^/\s@]{1,200}@",
}
_COMPILED = {kind: re.compile(form) for kind, form in _FORMS.items()}
_TELLING_KEY = re.compile(
    r"(?i)(?:^|[_-])(?:token|secret|passw(?:or)?d|credentials?|(?:api|access|secret|private)[_-]?key)$"
)
_RANDOM = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])[A-Za-z0-9+/=_.~-]{16,}")


def untrusted_pools(spec: RunSpec) -> list[SamplerPool]:
    """Return the pools whose rollouts count only after a check."""
    return [pool for pool in spec.samplers if pool.trust == "untrusted"]


def is_elsewhere(pool: SamplerPool, spec: RunSpec) -> bool:
    """Return whether a pool's workers count as on other people's machines.

    With `placement.roles`, a pool is elsewhere if it is not named there. Without it, a pool on
    accelerators is: an untrusted pool seldom shares the machine that the spec is applied on.
    """
    if spec.placement.roles is not None:
        return pool.name not in spec.placement.roles
    return pool.hardware.kind != "cpu"


@rule("security")
def plain_http(context: Context) -> Found:
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


@rule("security")
def public_address(context: Context) -> Found:
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
    urls = {"placement": spec.placement.url, "broadcast.origin": spec.broadcast.origin.url}
    for where, url in urls.items():
        if elsewhere:
            yield from relation(
                url is not None,
                f"{where}.url",
                f"is null, and pool {elsewhere[0]} is untrusted and on other machines",
                "the https:// address of a proxy before it (docs/public-runs.md)",
            )


@rule("security")
def unsigned_weights(context: Context) -> Found:
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


@rule("security")
def inline_secret(context: Context) -> Found:
    """A secret must be named under `secrets`, never written into a spec.

    A spec is in git, in pull requests, in spec.json of every run and with every worker. What is
    looked for are texts that have the published form of a credential (tokens of Hugging Face,
    GitHub, GitLab, Slack, OpenAI and Anthropic, AWS and Google keys, JSON web tokens, private keys
    in PEM), URLs with user:password@, and long random texts under keys like token or password in
    `data.sources[].params`. The finding does not quote them.
    """
    for location, text in _texts(context.spec.model_dump(mode="python", by_alias=True)):
        key = str(location[-1]) if "params" in location[:-1] else ""
        if kind := secret_kind(text, key):
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
    """Find every text of a spec with its location; items of named lists by name."""
    if isinstance(value, str):
        yield location, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*location, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            name = inner.get("name", index) if isinstance(inner, dict) else index
            yield from _texts(inner, (*location, name))


def secret_kind(text: str, key: str = "") -> str:
    """Return the kind of credential that a text looks like; empty for none.

    Args:
        text: a value of a spec.
        key: its key in a free map, else empty. There a long text of letters and digits under
            `token`, `api_key` or `password` counts as a secret.
    """
    for kind, form in _COMPILED.items():
        if form.search(text):
            return kind
    return f"a secret {key}" if _TELLING_KEY.search(key) and _RANDOM.fullmatch(text) else ""


@rule("reproducibility")
def unpinned_revision(context: Context) -> Found:
    """What comes from a hub must be pinned to a commit.

        revision is a commit of 40 hexadecimal digits, or the lock beside the spec has one

    A name, a branch and a tag are whatever their owner makes of them tomorrow: other weights,
    another chat template, other problems, under a spec that has not changed. The commit of model,
    tokenizer or `hf://` data belongs into `revision`; or `runspec lock` writes all of them into
    `<spec>.lock.yaml`. Local directories have no revision.
    """
    model, tokenizer = context.spec.model, context.spec.model.tokenizer
    named = [("model", model.hf or "", model.revision)]
    named += [("model.tokenizer", tokenizer.hf, tokenizer.revision)] if tokenizer else []
    from_hub = [one for one in named if is_on_hub(one[1], context.folder)]
    for source in context.spec.data.sources:
        if source.uri is not None and source.uri.startswith("hf://"):
            from_hub.append((f"data.sources.{source.name}", source.uri, source.revision))
    for path, name, revision in from_hub:
        if COMMIT.fullmatch(revision or ""):
            continue  # without it, the lock must have a commit for this very name
        pin = context.lock.pins.get(path) if context.lock else None
        yield from relation(
            pin is not None and pin.source == name and pin.commit is not None,
            f"{path}.revision",
            f"{name} is pinned to "
            + (f"{revision!r}, which may move" if revision else "no commit"),
            "set revision to the commit, or run `runspec lock`",
        )
