"""`runspec explain`: pages that answer, in eighty columns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runspec.cli.explain import WIDTH, explain_command, find_pages, topics


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
    assert text.startswith("clip-bounds  (error, group algorithm, runs of grpo)\n")
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
        ("maths", "did you mean math?"),
        ("target_lenght", "did you mean target_length?"),
        ("json_l", "did you mean jsonl?"),
        ("xyzzy", "`runspec explain --list` names everything"),
    ],
)
def test_an_unknown_topic_exits_2_with_a_hint(
    topic: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_command(topic, False) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and hint in captured.err


def test_a_kind_says_what_it_is_by_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("math", capsys)
    assert text.startswith(
        "math  (kind of reward)\n  1 for an answer that equals one of the truths"
    )
    assert "`reward: [{name: ..., kind: math}]`" in " ".join(text.split())
    assert "JSON" in shown("jsonl", capsys) or "one file, a folder of them" in shown(
        "jsonl", capsys
    )
    # one name may be of both
    both = shown("reasoning_gym", capsys)
    assert "(kind of reward)" in both and "(kind of source)" in both
    assert "Raises" not in both
    assert explain_command(None, True) == 0
    listed = capsys.readouterr().out
    assert "\nkinds of reward\n  code " in listed and "\nkinds of source\n  gsm8k " in listed


def test_nothing_of_a_plug_in_is_imported() -> None:
    program = "import sys; from runspec.cli.explain import *; explain_command('math', False); "
    program += "sys.exit('sampler' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0
    )


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
