"""The program of an answer."""

from __future__ import annotations

from textwrap import dedent, indent

FENCE = "```"
MAX_PROGRAM_CHARS = 256 * 1024


def program_of(answer: str) -> str:
    """The last fenced code block of an answer, one that is not closed included; the whole answer
    where there is none."""
    block: list[str] | None = None
    last: str | None = None
    margin = 0
    for line in answer.splitlines():
        text = line.lstrip()
        if not text.startswith(FENCE):
            if block is not None:
                block.append(line[margin:] if not line[:margin].strip() else line)
        elif block is None:
            block, margin = [], len(line) - len(text)
        else:
            last, block = "\n".join(block), None
    if block:
        last = "\n".join(block)
    return answer if last is None else last


def completions(prompt: str, text: str) -> list[str]:
    """Programs that a completion of a prompt may stand for, in the order in which they are tried:
    the whole function, or only its body, whose first line may have lost its indentation."""
    body = dedent(text).strip("\n")
    return [
        f"{prompt}\n\n{text}",
        text,
        f"{prompt}{text}",
        f"{prompt}    {text.lstrip()}",
        f"{prompt}{indent(body, '    ')}",
    ]
