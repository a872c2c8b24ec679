"""`runspec explain`: pages that answer, in eighty columns."""

from __future__ import annotations

import pytest

from runspec.cli.explain import explain_command, find_pages
from runspec.cli.explain_pages import WIDTH, topics


def shown(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert explain_command(topic, False) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", ["samplers.volunteers.dtype", "samplers.dtype"])
def test_a_field(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(path, capsys) == (
        "samplers.<name>.dtype\n"
        "  Type of weights and activations.\n"
        "\n"
        "  type       `float32` or `bfloat16`\n"
        "  default    bfloat16\n"
        "  change     newrun: it changes what is learned, or what the run stands on: it\n"
        "             takes another run once a step is trained\n"
        "  placement  a file of kind Placement may not set it\n"
    )


def test_a_rule_has_its_page_its_examples_and_how_to_accept_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown("clip-bounds", capsys)
    assert text.startswith("clip-bounds  (error, group algorithm)\n")
    assert "delta > 1 + eps_high" in text
    assert '# runspec: ignore[clip-bounds] reason="..."' in text
    assert text.index("\nbad\n") < text.index("\ngood\n")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("algorithm.grop_size", "did you mean algorithm.group_size?"),
        ("prefil_share", "did you mean verify.prefill_share?"),
        ("group_size", "did you mean algorithm.group_size?"),
        ("clip-bound", "did you mean clip-bounds?"),
        ("h100-80", "did you mean h100-80g?"),
        ("xyzzy", "`runspec explain --list` names everything"),
    ],
)
def test_an_unknown_topic_exits_2_with_a_hint(
    topic: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_command(topic, False) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and hint in captured.err


def test_everything_has_a_page_in_eighty_columns() -> None:
    for topic in topics():
        pages = find_pages(topic)
        assert pages, topic
        for page in pages:
            too_long = [line for line in page if len(line) > WIDTH and not is_example(line, page)]
            assert too_long == [], topic


def is_example(line: str, page: list[str]) -> bool:
    """Whether a line is an example file's own, or a formula's."""
    return ("bad" in page and page.index(line) > page.index("bad")) or line.startswith("      ")
