"""What `runspec serve` and `chat` do before vLLM's server starts, and how answers are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.cli.chat import messages, print_reply
from runspec.cli.serve import link_files, served
from runspec.core.errors import UserError
from runspec.core.run_files import weights_folder
from runspec.core.spec.schema import RunSpec
from sampler.tasks.prompts import PromptForm
from tests.runspec.cli.in_process import runspec
from tests.runspec.cli.published import flip_bit, publish_run
from tests.runspec.local.fake_run import small_spec

QUESTION = "stop"


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """The folder of a run `small` whose versions 0 and 1 are published."""
    return publish_run(tmp_path, 2).parent


def test_names_say_whether_it_is_the_newest(runs_dir: Path) -> None:
    assert served("small", runs_dir).names == ("small", "small@v1")
    assert served("small@0", runs_dir).names == ("small@v0",)
    folder = weights_folder(runs_dir / "small") / "v0"
    assert served(str(folder), runs_dir).names == ("v0",)


def test_tampered_files_are_refused_before_anything_starts(runs_dir: Path) -> None:
    flip_bit(weights_folder(runs_dir / "small") / "v1")
    done = runspec("serve", "small", "--runs-dir", runs_dir)
    assert done.returncode == 1
    assert "not version 1 of small" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(UserError, match="version 7 is not here"):
        served("small@7", runs_dir)


def test_what_is_removed_meanwhile_is_still_served(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "other.txt").write_text("x")
    link_files(source, tmp_path / "all")
    link_files(source, tmp_path / "some", only=("config.json",))
    (source / "config.json").unlink()
    assert (tmp_path / "all" / "config.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["config.json"]


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("target", [None, 24])
def test_a_chat_asks_as_the_run_does(role: str, target: int | None) -> None:
    spec: RunSpec = small_spec("small", 5, f"data.length_prompt_role={role}")
    data = spec.data.model_copy(update={"system_prompt": "Be brief."})
    expected = PromptForm.of(data).messages(QUESTION, target)
    assert messages(data, QUESTION, target) == expected
    assert messages(None, QUESTION, target) == [{"role": "user", "content": QUESTION}]


def test_thinking_is_dim_and_what_cannot_be_printed_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = [("so \x1b[31m", 1), ("long</th", 2), ("ink>pots", 3), ("\n", 4)]
    reply = print_reply(iter(pieces), dim=True)
    assert (reply.text, reply.tokens) == ("so \x1b[31mlong</think>pots\n", 4)
    shown = capsys.readouterr().out
    assert shown == "\033[2mso ?[31mlong</think>\033[0mpots\n\033[0m"
    print_reply(iter(pieces), dim=False)
    assert capsys.readouterr().out == "so ?[31mlong</think>pots\n"
    assert json.dumps(reply.text)
