"""Tokenizer of a local Hugging Face directory, read from its JSON files with size limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import read_bounded

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json and tokenizer_config.json of a directory.

    Malformed parts are left out: `runspec doctor` checks whether a role can load the files.
    """

    folder: Path
    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles | None:
        """Return the files of a directory; None if its tokenizer.json cannot be read."""
        tokenizer = _json_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if tokenizer is None:
            return None
        config = _json_object(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
        return cls(folder, tokenizer, config or {})

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Ids by token, added tokens included."""
        model = self.tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        pairs: list[tuple[Any, Any]] = []
        if isinstance(vocabulary, dict):
            pairs = list(vocabulary.items())
        elif isinstance(vocabulary, list):  # unigram: [token, score] each, in order
            pairs = [
                (row[0], i) for i, row in enumerate(vocabulary) if isinstance(row, list) and row
            ]
        added = self.tokenizer.get("added_tokens")
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict):
                pairs.append((token.get("content"), token.get("id")))
        return {text: id_ for text, id_ in pairs if isinstance(text, str) and type(id_) is int}

    @property
    def largest_id(self) -> int | None:
        return max(self.ids.values(), default=None)

    @property
    def end_token(self) -> str | None:
        """`eos_token`, as text."""
        value = self.config.get("eos_token")
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None

    @property
    def end_ids(self) -> Mapping[str, frozenset[int]]:
        """`eos_token_id` by file, config.json and generation_config.json, if they name any."""
        found = {}
        for name in ("config.json", "generation_config.json"):
            value = (_json_object(self.folder / name, MAX_CONFIG_BYTES) or {}).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if named := frozenset(i for i in ids if type(i) is int):
                found[name] = named
        return found

    @property
    def has_template(self) -> bool:
        return "chat_template" in self.config or (self.folder / "chat_template.jinja").is_file()

    @property
    def template(self) -> str | None:
        """Text of the chat template; None if there is none, or several with names."""
        path = self.folder / "chat_template.jinja"
        try:
            if path.is_file():
                return read_bounded(path, MAX_CONFIG_BYTES).decode(errors="replace")
        except (OSError, UserError):
            return None
        said = self.config.get("chat_template")
        return said if isinstance(said, str) else None


def _json_object(path: Path, max_bytes: int) -> dict[str, Any] | None:
    try:
        if not path.is_file():  # reading a pipe would block
            return None
        value = json.loads(read_bounded(path, max_bytes))
    except (OSError, UserError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
