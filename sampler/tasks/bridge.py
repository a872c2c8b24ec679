"""What stands between two turns of a rollout, found in the model's chat template.

A rollout only grows: what the model sampled is never decoded and encoded again, and its text never
enters here. The template is rendered with placeholders for the model's words and for observations.
What it writes around them is a function of the observations' roles. A template that writes
something else for other words, or changes earlier turns once more follow, is refused.

An observation is encoded without special tokens: a program that prints `<|im_start|>system` has
printed text. A turn that its limit cut gets its end token from the bridge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.core.tokenizer_files import ASSISTANT, ChatTemplate
from sampler.tasks.environment import Message

WORDS = (
    ("one-two-three", "four-five"),
    ("<think>six</think>seven", '{"name": "eight"}'),
)
"""Two sets of placeholders for what the model says in two turns."""
_OBSERVED = "nine-ten-"
_REMEDY = "use a model whose chat_template.jinja keeps earlier turns as they were sampled"


class Bridge:
    """Makes the tokens between two turns.

    Args:
        tokenizer: of the model.
        template: of the model.
        end_token: the only token that ends a turn.
        opening: messages of a prompt, for the rendering.
        tools: schemas that the prompt lists.
        prefill: text behind the generation prompt, `data.think_prefill`'s; empty without it.
        place: of the template, for messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        end_token: int,
        *,
        opening: Sequence[Mapping[str, str]],
        tools: Sequence[Mapping[str, Any]],
        prefill: str,
        place: str,
    ) -> None:
        self._tokenizer, self._template, self._end = tokenizer, template, end_token
        self._opening, self._tools, self._prefill = [*opening], [*tools], prefill
        self._place = place
        # Its own copy: whether special tokens are read in a text is a setting of the whole.
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self.pieces = lru_cache(64)(self._pieces)

    def tokens(self, observations: Sequence[Message], *, ended: bool, most: int) -> list[int]:
        """Return the tokens between a turn and the next.

        Args:
            observations: what the environment answered, at least one message.
            ended: whether the turn ended with the end token.
            most: tokens of each observation; the rest of it is cut.
        """
        pieces = self.pieces(tuple(each["role"] for each in observations))
        found = [*([] if ended else [self._end]), *pieces[0]]
        for each, after in zip(observations, pieces[1:], strict=True):
            text = self._plain.encode(each["content"], add_special_tokens=False).ids
            found += [*text[:most], *after]
        return found

    def _pieces(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Return the tokens behind the end token up to the first observation, then those behind
        each observation, the last up to where the model goes on.

        Raises:
            UserError: the template does not write the same around other words.
        """
        found = [self._around(roles, words) for words in WORDS]
        if found[0] != found[1]:
            self._refuse("writes other text between turns where the model says other words")
        texts = found[0]
        if not texts[0].startswith(end := self._tokenizer.id_to_token(self._end) or ""):
            self._refuse(f"does not end the model's turn with {end!r}")
        texts[0] = texts[0].removeprefix(end)
        return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def _around(self, roles: Sequence[str], words: Sequence[str]) -> list[str]:
        """Return the text around observations after the first turn, checked after the second."""
        raw = self._template.render(self._opening, self._tools or None)
        opened = self._prefill.strip() and not raw.rstrip().endswith(self._prefill.strip())
        prefill = self._prefill if opened else ""
        observed = [f"{_OBSERVED}{number}" for number in range(len(roles))]
        answers = [{"role": r, "content": o} for r, o in zip(roles, observed, strict=True)]
        first, second = (prefill + text for text in words)
        turn = [{"role": ASSISTANT, "content": first}, *answers]
        once = self._rendered(turn)
        twice = self._rendered([*turn, {"role": ASSISTANT, "content": second}, *answers])
        if not once.startswith(raw + first):
            self._refuse("renders the model's first turn otherwise once more follows")
        rest = once[len(raw + first) :]
        texts: list[str] = []
        for text in observed:
            before, cut, rest = rest.partition(text)
            if not cut:
                self._refuse(f"leaves out or changes a message of role {roles[len(texts)]!r}")
            texts.append(before)
        texts.append(rest)
        again = texts[0] + "".join(o + after for o, after in zip(observed, texts[1:], strict=True))
        if twice != once + second + again:
            self._refuse("renders earlier turns otherwise once more follow")
        texts[-1] += prefill
        return texts

    def _rendered(self, turns: Sequence[Mapping[str, str]]) -> str:
        return self._template.render([*self._opening, *turns], self._tools or None)

    def _refuse(self, what: str) -> None:
        raise UserError(f"the chat template {what}", place=self._place, remedy=_REMEDY)
