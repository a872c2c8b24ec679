"""Rules on reproducibility: pinned revisions and the seed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule
from runspec.lock.cache import is_on_hub

_COMMIT = re.compile(r"[0-9a-f]{40}")


@rule("unpinned-revision", "reproducibility")
def unpinned_revision(context: Context) -> Iterator[Violation]:
    """What comes from a hub must be pinned to a commit.

        revision is a commit of 40 hexadecimal digits, or the lock beside the spec has one

    A name, a branch and a tag are whatever their owner makes of them tomorrow: other weights,
    another chat template, other problems, under a spec that has not changed. The commit of model,
    tokenizer or `hf://` data belongs into `revision`; or `runspec lock` writes all of them into
    `<spec>.lock.yaml`. Local directories have no revision.
    """
    for path, name, revision in _hub_names(context):
        if not _COMMIT.fullmatch(revision or "") and not _is_locked(context, path, name):
            said = f"{revision!r}, which may move" if revision else "no commit"
            yield Violation(
                (*path, "revision"),
                f"{name} is pinned to {said}",
                suggestion="set revision to the commit, or run `runspec lock`",
            )


def _is_locked(context: Context, path: tuple[str, ...], name: str) -> bool:
    """Whether the lock has a commit for this very name."""
    pin = context.lock.pins.get(".".join(path)) if context.lock else None
    return pin is not None and pin.source == name and pin.commit is not None


def _hub_names(context: Context) -> Iterator[tuple[tuple[str, ...], str, str | None]]:
    """Location, name and revision of what comes from a hub."""
    model, tokenizer = context.spec.model, context.spec.model.tokenizer
    if model.hf is not None and is_on_hub(model.hf, context.folder):
        yield ("model",), model.hf, model.revision
    if tokenizer is not None and is_on_hub(tokenizer.hf, context.folder):
        yield ("model", "tokenizer"), tokenizer.hf, tokenizer.revision
    for source in context.spec.data.sources:
        if source.uri is not None and source.uri.startswith("hf://"):
            yield ("data", "sources", source.name), source.uri, source.revision
