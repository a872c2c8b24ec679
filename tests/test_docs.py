"""Every command that README and docs show exists, with every flag; README's own are run."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runspec.cli import app
from runspec.core.models.family import MODELS_GROUP
from runspec.core.schema import Broadcast, Verify

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
COMMAND = re.compile(r"^ *(?:\$ )?((?:[A-Z_]+=\S+ )*)(python -m|runspec|make) (.+)$")


def shown() -> list[tuple[str, list[str]]]:
    """(page:line, words) of every command line in a code block, continued lines joined."""
    found = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        fenced = False
        for number, line in enumerate(lines, start=1):
            fenced ^= line.startswith("```")
            match = COMMAND.match(line) if fenced or line.startswith("    ") else None
            if match:
                words = f"{match[2]} {match[3]}".split("#")[0].rstrip(" &")
                found.append((f"{page.name}:{number}", words.replace("[", " ").replace("]", " ")))
    return [(place, shlex.split(words)) for place, words in found]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `--help` of a shown command prints; a command that is not there raises or fails."""
    if words[0] == "runspec":
        result = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    package = words[2]
    found = find_spec(package)
    assert found is not None, package
    folder = found.submodule_search_locations is not None
    main = import_module(f"{package}.__main__" if folder else package).main
    with pytest.raises(SystemExit) as stopped:
        main([*takewhile(lambda word: not word.startswith("-"), words[3:]), "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


SHOWN = shown()


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 20


@pytest.mark.parametrize(("place", "words"), SHOWN, ids=[place for place, _ in SHOWN])
def test_a_shown_command_exists(
    place: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks"):
        name = words[2].removeprefix("benchmarks").lstrip(".")
        known = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {
            path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")
        }
        assert (name or "__main__") in known
        return
    text = help_of(words, capsys)
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    assert [flag for flag in flags if flag not in text] == []


def test_the_specs_that_readme_lints_are_clean() -> None:
    specs = [str(path) for path in sorted((ROOT / "specs").glob("*.yaml"))]
    command = [sys.executable, "-m", "runspec", "lint", *specs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_promise_names_tests_that_exist_and_where_they_run() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    table = page.partition("\n## Promises")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith("| promise |")
    ]
    assert len(rows) > 100
    for promise, tests, where in rows:
        named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", tests)
        assert named or "`make lint`" in tests, promise
        runs = {where_it_runs(ROOT / file, test) for file, test in named} or {"gate"}
        assert where == ("gate" if "gate" in runs else "nightly"), promise


def where_it_runs(path: Path, test: str) -> str:
    """`gate` or `nightly`, of a test of a file, or of all tests of a file or folder."""
    if "campaigns" in path.parts:
        return "nightly"
    marks = {}
    for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        own = [each for each in tree.body if isinstance(each, ast.Assign)]
        whole = any("pytest.mark.nightly" in ast.unparse(each) for each in own)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                marked = any("nightly" in ast.unparse(each) for each in node.decorator_list)
                marks[node.name] = "nightly" if whole or marked else "gate"
    if test:
        return marks[test]
    tests = {where for name, where in marks.items() if name.startswith("test_")}
    return "gate" if "gate" in tests else "nightly"


@pytest.mark.nightly
def test_the_site_has_no_broken_link(tmp_path: Path) -> None:
    mkdocs = ROOT / ".venv" / "docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("`make docs` makes the environment")
    command = [mkdocs, "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = ("runspec", "learner_jax", "bridge", "broadcast", "sampler", "verify", "tests")
SPEC_FIELDS = {"verify": set(Verify.model_fields), "broadcast": set(Broadcast.model_fields)}
"""Fields of the spec, whose names begin as those of our packages do."""


def test_every_path_that_the_page_on_the_architecture_names_is_there() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w./-]+)`", page)
    paths = [name for name in quoted if "/" in name or name.endswith((".py", ".toml"))]
    linked = [f"docs/{name}" for name in re.findall(r"\]\(([\w.-]+\.md)", page)]
    assert len(paths) > 80
    assert [name for name in [*paths, *linked] if not (ROOT / name).exists()] == []


def unknown(name: str, files: list[str]) -> bool:
    """Whether a quoted name is that of a file or module of ours that is not there."""
    first, *rest = name.split(".")
    if name.endswith(".py"):  # a path from the root, or its end
        return not any(f"/{file}".endswith(f"/{name}") for file in files)
    if first not in PACKAGES or not rest or rest[0] in SPEC_FIELDS.get(first, ()):
        return False
    if name in {*entry_points().groups, MODELS_GROUP}:
        return False
    for length in range(len(rest) + 1, 1, -1):
        path = "/".join([first, *rest][:length])
        module = next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in files), None)
        if module:  # then the next name stands in it
            inside = rest[length - 1 : length]
            text = (ROOT / module).read_text(encoding="utf-8")
            return not all(re.search(rf"\b{word}\b", text) for word in inside)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    files = tracked("*.py")
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    quoted = set(re.findall(r"`([\w./-]+)(?:::\w+)?`", text))
    assert sorted(name for name in quoted if unknown(name, files)) == []


def tracked(*patterns: str) -> list[str]:
    """Paths of the files that git tracks."""
    command = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def test_the_nucleus_can_be_read_in_one_sitting() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split("\n## The nucleus\n")[1]
    files = re.findall(r"^\d+\. `([\w./-]+)`", section, re.MULTILINE)
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert 10 <= len(files) <= 14
    assert lines <= 3500


def test_every_step_of_a_walk_is_a_function_of_its_file() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split("\n## Walks\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w./-]+)` `([\w.]+)`: ", section, re.MULTILINE)
    assert len(steps) >= 35 and len(steps) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    for file, name in steps:
        text = (ROOT / file).read_text(encoding="utf-8")
        kinds = ["class"] * name.count(".") + ["def"]
        for kind, word in zip(kinds, name.split("."), strict=True):
            assert re.search(rf"^ *(?:async )?{kind} {word}\b", text, re.MULTILINE), (file, name)


def test_no_file_refers_to_notes_outside_the_repository() -> None:
    outside = re.compile(r"\b(?:DESIGN|RECIPE|GPU_ATTENTION|(?:FINDINGS|STYLE)\.md)\b")
    files = [ROOT / name for name in tracked("*.py", "*.md", "*.yaml", "*.toml", "Makefile")]
    texts = {f: f.read_text(encoding="utf-8") for f in files if f != Path(__file__) and f.exists()}
    assert len(texts) > 500
    assert [str(file) for file, text in texts.items() if outside.search(text)] == []
