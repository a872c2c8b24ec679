"""Messages that put a problem to a policy, before any chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runspec.core.spec.schema import Data

if TYPE_CHECKING:  # it loads tokenizers
    from runspec.core.tokenizer_files import Message


def prompt_messages(data: Data, problem: str, target: int | None) -> list[Message]:
    """Return the system message, if it has any content, and the user message.

    Args:
        data: says the form.
        problem: its text.
        target: length that the prompt asks for, in tokens, on a line of its own; None asks for
            none.
    """
    length = None if target is None else data.length_prompt.replace("{target}", str(target))
    in_system = length if data.length_prompt_role == "system" else None
    in_user = length if data.length_prompt_role == "user" else None
    system = "\n".join(text for text in (data.system_prompt, in_system) if text)
    user = problem if in_user is None else f"{problem}\n{in_user}"
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": user}]
