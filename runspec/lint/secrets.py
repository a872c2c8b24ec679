"""Which texts are credentials: by the forms that their issuers publish."""

from __future__ import annotations

import re

# Prefixes: docs.github.com "About authentication", huggingface.co "User access tokens",
# docs.gitlab.com "Token overview", api.slack.com "Token types", docs.aws.amazon.com "IAM
# identifiers", cloud.google.com "API keys", RFC 7519 (JWT), RFC 7468 (PEM), RFC 3986 (userinfo).
# Repetitions that could begin at many places are bounded: texts are whatever somebody wrote.
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


def secret_kind(text: str, key: str = "") -> str:
    """What kind of credential a text looks like; empty for none.

    Args:
        text: a value of a spec.
        key: what it is the value of, where the schema leaves the meaning of keys to others: a long
            text of letters and digits under `token`, `api_key` or `password` counts there.
    """
    for kind, form in _COMPILED.items():
        if form.search(text):
            return kind
    return f"a secret {key}" if _TELLING_KEY.search(key) and _RANDOM.fullmatch(text) else ""
