"""Prompts: from a problem's text to prompt tokens, and from output tokens to an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from runspec.core.canonical import digest_bytes, hash_parts
from runspec.core.errors import UserError
from runspec.core.schema import Data
from runspec.core.tokenizer_files import ChatTemplate, TokenizerFiles
from sampler.tasks.bridge import Bridge
from sampler.tasks.environment import Message

THINK, THINK_END = "<think>", "</think>"


Thinking = Literal["required", "optional", "none"]
"""What of an output is the answer: `data.thinking`."""


def answer_in(output: str, thinking: Thinking) -> str | None:
    """Return the answer in a text of a model: the part after its first `</think>`, or all of it
    where the thinking is not required; None if it has none.

    The thinking ends once. A later `</think>` is a part of the answer; otherwise a model could
    answer, think about the answer, and answer again.
    """
    _, think_end, answer = output.partition(THINK_END)
    if think_end and thinking != "none":
        return answer.strip()
    return None if thinking == "required" else output.strip()


def unformatted(data: Data, problem: str, target: int | None) -> str:
    """Return the contents of a prompt's messages without a template, each on a new line."""
    return "\n".join(message["content"] for message in data.prompt_messages(problem, target))


class PromptCodec:
    """A model's tokenizer and chat template.

    Args:
        files: tokenizer files of a model directory.
        data: says the form of prompts, and what of an output is the answer.

    Raises:
        UserError: a broken template, a template without support for a system message that the
            prompts need, or no end token.
    """

    def __init__(self, files: TokenizerFiles, data: Data) -> None:
        self._tokenizer: Tokenizer = files.tokenizer
        self._data = data
        self.thinking: Thinking = data.thinking or "required"
        """What of an output is the answer."""
        self._place = files.place
        self._template = ChatTemplate.of(files)
        eos = files.special_tokens.get("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        if eos_id is None:
            raise UserError(
                f"eos_token {eos!r} is not in the vocabulary",
                place=files.place,
                remedy="name the end token in tokenizer_config.json",
            )
        self.eos_token_id: int = eos_id
        # A tokenizer saved for training may silently truncate or pad prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if self._template is not None and (
            data.system_prompt or data.length_prompt_role == "system"
        ):
            self._template.require_system_message()

    @classmethod
    def read(cls, directory: Path, data: Data) -> PromptCodec:
        """Read the codec of a model directory.

        Raises:
            UserError: a file is missing or malformed, or an error of the class.
        """
        return cls(TokenizerFiles.read(directory), data)

    @property
    def digest(self) -> str:
        """Digest of everything that a prompt's tokens depend on besides the problem and the
        target."""
        data, template = self._data, self._template
        parts = [
            digest_bytes(self._tokenizer.to_str().encode()),
            "" if template is None else template.source,
            repr(sorted(template.special_tokens.items())) if template else "",
            data.length_prompt,
            data.length_prompt_role,
            data.system_prompt or "",
            str(data.think_prefill),
            *(f"{package} {version(package)}" for package in ("tokenizers", "jinja2")),
        ]
        return hash_parts(*parts).hex()

    def prompt_text(
        self,
        problem: str,
        target: int | None,
        *,
        before: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the text to encode: the messages in the chat template, and the opened thinking.

        Args:
            problem: text of the user's last message.
            target: length that it asks for.
            before: messages of an environment between the system's and the last.
            tools: schemas of tools that the template lists.
        """
        if self._template is None:
            text = unformatted(self._data, problem, target)
            opening = f"\n{THINK}\n"
        else:
            *system, last = self._data.prompt_messages(problem, target)
            text = self._template.render([*system, *before, last], [*tools] or None)
            opening = f"{THINK}\n"
        if self._data.think_prefill and not text.rstrip().endswith(THINK):
            text += opening
        return text

    def prompt_tokens(
        self,
        problem: str,
        target: int | None,
        *,
        before: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the tokens of a prompt; the arguments are those of `prompt_text`."""
        # A template writes the special tokens itself.
        text = self.prompt_text(problem, target, before=before, tools=tools)
        return self._tokenizer.encode(text, add_special_tokens=self._template is None).ids

    def bridge(self, tools: Sequence[Mapping[str, Any]]) -> Bridge:
        """Return what makes the tokens between turns of an environment with these tools.

        Raises:
            UserError: there is no template, or it cannot hold several turns as they were sampled.
        """
        if self._template is None:
            raise UserError(
                "no chat template: it says what stands between the turns of an environment",
                place=self._place,
                remedy="use a model with a chat_template.jinja",
            )
        made = Bridge(
            self._tokenizer,
            self._template,
            self.eos_token_id,
            opening=self._data.prompt_messages("eleven", None),
            tools=tools,
            prefill=f"{THINK}\n" if self._data.think_prefill else "",
            place=self._place,
        )
        made.pieces(("tool",))
        return made

    def prompt_lengths(self, problems: Sequence[str], target: int | None) -> list[int]:
        """Return the number of tokens of each problem's prompt. One batch, on all cores."""
        texts = [self.prompt_text(problem, target) for problem in problems]
        encoded = self._tokenizer.encode_batch_fast(
            texts, add_special_tokens=self._template is None
        )
        return [len(one) for one in encoded]

    def encode(self, text: str) -> list[int]:
        """Encode text as the model would write it: no template, no special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special tokens included."""
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    def token(self, text: str) -> int:
        """Return the id of one token.

        Raises:
            UserError: the vocabulary has no such token.
        """
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise UserError(f"the vocabulary has no token {text!r}", place=self._place)
        return token

    def said(self, turn: Sequence[int]) -> str:
        """Return the message in a turn's tokens, without its thinking; empty if it has none."""
        text = self.decode([token for token in turn if token != self.eos_token_id])
        return answer_in(text, self.thinking) or ""

    def answer(self, output_tokens: Sequence[int]) -> str | None:
        """Return the answer in the text before the end token; None if it has none, or the end
        token is missing. See `answer_in`.

        An output that was cut off has no answer.
        """
        tokens = [int(token) for token in output_tokens]
        # By token: a vocabulary may have gaps, so its size is no bound.
        known = all(
            token >= 0 and self._tokenizer.id_to_token(token) is not None for token in {*tokens}
        )
        if not tokens or tokens[-1] != self.eos_token_id or not known:
            return None
        return answer_in(self.decode(tokens[:-1]), self.thinking)
