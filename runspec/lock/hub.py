"""Commits of repositories on the Hugging Face Hub, asked of its API."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import quote

import aiohttp

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.http_client import NoAnswer, fetch
from runspec.lock.cache import Repository

ENDPOINT = "https://huggingface.co"
DEADLINE_S = 20.0
MAX_BYTES = 4 * 1024 * 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")


def ask_commit(
    repository: Repository,
    revision: str | None,
    env: Mapping[str, str],
    *,
    deadline_s: float = DEADLINE_S,
) -> str:
    """The commit that a branch or tag of a repository is at now.

    Args:
        repository: which one.
        revision: branch, tag or commit; `main` when None.
        env: HF_ENDPOINT names another server than the Hub's own; HF_HUB_OFFLINE forbids asking;
            HF_TOKEN is sent along over HTTPS, for repositories that are not everybody's.
        deadline_s: for the whole answer.

    Raises:
        UserError: it was not found out, with the reason.
    """
    endpoint = (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    path = f"{repository.kind}s/{repository.name}/revision/{quote(revision or 'main', safe='')}"
    url = f"{endpoint}/api/{path}"
    if env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise _unknown(repository, url, "HF_HUB_OFFLINE is set")
    token = env.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token and url.startswith("https:") else {}
    try:
        data = asyncio.run(_get(f"{url}?expand=sha", headers, deadline_s))
        commit = parse_object(data, max_bytes=MAX_BYTES).get("sha")
    except (NoAnswer, MalformedJson) as error:
        raise _unknown(repository, url, str(error)) from error
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _unknown(repository, url, "the answer names no commit")
    return commit


async def _get(url: str, headers: dict[str, str], deadline_s: float) -> bytes:
    async with aiohttp.ClientSession(trust_env=True) as session:
        answer = await fetch(
            *(session, "GET", url),
            headers=headers,
            max_bytes=MAX_BYTES,
            timeout_s=deadline_s,
            redirects=5,
        )
    if not answer.is_success:
        raise NoAnswer(f"the Hub answers {answer.status}")
    return answer.content


def _unknown(repository: Repository, url: str, why: str) -> UserError:
    return UserError(
        f"the commit of {repository.name} is not known: {why.splitlines()[0]}",
        place=url,
        remedy="name the commit as `revision`, download the repository, or try where the Hub "
        "can be reached",
    )
