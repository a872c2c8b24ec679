"""The tokenizer files of a model directory, read with bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.core.files import read_bounded

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json, and tokenizer_config.json with the chat template where there is one."""

    tokenizer: Tokenizer
    config: Mapping[str, Any]
    place: str
    """Where they come from, for messages."""

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja, which goes before
        the template in the configuration.

        Raises:
            UserError: a file that is missing or malformed.
        """
        config = _read_config(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.is_file():
            source = read_bounded(template, MAX_CONFIG_BYTES).decode(errors="replace")
            config = {**config, "chat_template": source}
        return cls(_read_tokenizer(directory / "tokenizer.json"), config, str(directory))

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and their like, as text, where the configuration names them."""
        found = {}
        for kind in _SPECIAL:
            value = self.config.get(f"{kind}_token")
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[f"{kind}_token"] = content
        return found


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(read_bounded(path, MAX_TOKENIZER_BYTES))
    except Exception as error:  # the library raises nothing narrower
        what = "cannot read the tokenizer" if isinstance(error, OSError) else "not a tokenizer"
        raise UserError(
            f"{what}: {error}",
            place=str(path),
            remedy="point at a model directory with a tokenizer.json",
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
        if isinstance(config, dict):
            return config
        reason = "not a JSON object"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise UserError(
        f"cannot read the tokenizer's configuration: {reason}",
        place=str(path),
        remedy="point at a model directory with a tokenizer_config.json",
    )
