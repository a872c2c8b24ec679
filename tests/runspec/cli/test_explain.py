"""`runspec explain`: pages that answer, in eighty columns."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from runspec.cli import app
from runspec.cli.explain import explain_command, find_pages
from runspec.cli.explain_pages import WIDTH, index, topics
from runspec.lint.registry import RULES


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
        "             takes another run\n"
        "  placement  a file of kind Placement may not set it\n"
    )


def test_a_number_has_its_unit_range_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("algorithm.fill.max_groups", capsys)
    assert "  type       number, at least 1\n" in text
    assert "  unit       times the groups needed\n" in text
    assert "  default    4.0\n" in text
    assert "default    none: it is required" in shown("optimizer.lr", capsys)
    assert "default    5m" not in shown("algorithm.fill.deadline", capsys)
    assert "default    90m" in shown("algorithm.fill.deadline", capsys)


def test_a_block_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("learner", capsys)
    assert "a file of kind Placement may set some of it" in text
    assert "\n  mesh: map; default that of its keys\n" in text
    assert "\n  logits_chunk: whole number, at least 1, or null (tokens); default null\n" in text
    assert "may set it" in shown("learner.mesh", capsys)
    assert "\n  upload: rate, like" in shown("broadcast.relays.eu", capsys)


def test_a_rule_has_its_page_its_examples_and_how_to_accept_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown("clip-bounds", capsys)
    assert text.startswith("clip-bounds  (error, group algorithm)\n")
    assert "delta > 1 + eps_high" in text
    assert '# runspec: ignore[clip-bounds] reason="..."' in text
    assert text.index("\nbad\n") < text.index("\ngood\n")


def test_a_name_of_two_things_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("algorithm", capsys)
    assert text.startswith("algorithm\n") and "\nrules of the group algorithm\n" in text
    assert "\n  clip-bounds  " in text


def test_hardware_and_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tpu-v5p          95 GB     459 TFLOP/s     2765 GB/s" in shown("hardware", capsys)
    assert "459 TFLOP/s dense bfloat16" in shown("tpu-v5p", capsys)


def test_the_kinds_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    placement = shown("Placement", capsys)
    assert "\n  learner.mesh\n" in placement and "\n  learner.mesh.fsdp\n" not in placement
    assert "algorithm" not in placement
    assert "\n  samplers: list of named maps" in shown("Run", capsys)
    assert explain_command(None, False) == 0
    assert capsys.readouterr().out.startswith("Run\n")


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


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_command(None, True) == 0
    words = set(capsys.readouterr().out.split())
    assert [topic for topic in topics() if topic not in words and topic[0].islower()] == []
    assert set(RULES) <= words
    assert [line for line in index() if len(line) > WIDTH] == []


def test_no_colour_where_it_is_piped() -> None:
    result = CliRunner().invoke(app, ["explain", "learner.mesh"])
    assert result.exit_code == 0 and "\x1b" not in result.output
