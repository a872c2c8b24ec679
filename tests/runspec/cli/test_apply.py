"""`runspec apply`: one message for each mistake, before a role starts, and nothing is left behind.

A message names the thing, the place and the remedy.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from runspec.cli.init import initial_files
from runspec.core import files
from tests.harness import ROOT, TARGET_SHORT
from tests.object_store import s3_server
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import prepared, small_spec
from tests.sampler.tasks.grading.plugin import install

pytestmark = pytest.mark.slow

SMALL = (TARGET_SHORT, "--profile", "laptop", "--set", "name=small")
FILE_THERE = "Not a directory: a file is there"
ROWS = [
    {"problem_id": f"add-{a}-{b}", "task_type": "math", "prompt": f"{a} + {b}",
     "verification_info": {"ground_truth": str(a + b)}}
    for a in range(2, 12) for b in range(2, 12)
]  # fmt: skip


class Project:
    """A folder with a spec of one's own problems, which is right until a test makes it wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "spec.yaml"
        self.spec.write_text(initial_files("problems", "sums")["spec.yaml"])
        self.write_rows(ROWS)

    def replace(self, old: str, new: str) -> None:
        text = self.spec.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the spec"
        self.spec.write_text(text.replace(old, new))

    def write_rows(self, rows: list[dict[str, object]]) -> None:
        lines = [json.dumps(row) + "\n" for row in rows]
        (self.folder / "problems.jsonl").write_text("".join(lines))

    def name_model(self, hf: str) -> None:
        """Has the spec name a model instead of a shape."""
        text = self.spec.read_text()
        shape = text[text.index("  shape:") : text.index("data:")]
        self.spec.write_text(text.replace(shape, f"  hf: {hf}\n"))

    def refuses(self, *words: str, sets: tuple[str, ...] = ()) -> None:
        """The spec is not applied, every word stands in the message, and there is no run."""
        more = [word for each in sets for word in ("--set", each)]
        refused(runspec("apply", self.spec, "--runs-dir", self.folder / "runs", *more), *words)
        assert not (self.folder / "runs").exists()


def refused(done: CompletedProcess[str], *words: str) -> None:
    """The command failed, and every one of the words stands in its message."""
    said = " ".join(done.stderr.split())
    assert done.returncode in (1, 2), said
    assert [word for word in words if word not in said] == [], said
    assert "Traceback" not in said


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path)


@pytest.fixture
def unread_problems(monkeypatch):
    """Problems are taken to be right: reading them takes a process seconds."""
    monkeypatch.setattr("runspec.local.planning.with_problems", lambda plan, machine, say: plan)


MATH = "- {name: math, kind: math}"
SECRET = "secrets: {HF_TOKEN: {from: {env: NO_SUCH_SECRET}}}"


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("seed: 42", "sede: 42", ["spec.yaml:10:1", "sede", "did you mean seed"]),
        (MATH, MATH.replace("kind: math", "kind: maht"), ["spec.yaml:", "did you mean math"]),
        ("{zero_variance: false}", "{zero_variance: false", ["spec.yaml:55:12", "not closed"]),
        ("lr: 5e-4", 'lr: "1e-6"', ["spec.yaml:", "optimizer.lr", "1e-6"]),
        ("uri: problems.jsonl", "uri: gone.jsonl", ["data.sources.problems", "gone.jsonl"]),
        ("type: qwen2", "type: gpt2", ["spec.yaml:", "model.shape.model_type", "gpt2", "qwen2"]),
        (MATH, "- {name: code, kind: code}", ["math", "reward", "100"]),
        ("max_prompt_tokens: 64", "max_prompt_tokens: 4", ["problems", "max_prompt_tokens", "4"]),
        ("budget:", f"{SECRET}\nbudget:", ["secrets.HF_TOKEN", "NO_SUCH_SECRET"]),
    ],
)
def test_a_mistake_in_the_spec_is_named_with_its_place_and_remedy(project, right, wrong, words):
    project.replace(right, wrong)
    project.refuses(*words)


RAISES = """\
class Term:
    role = "task"

    def __init__(self, reward):
        pass

    def score(self, problem, answer):
        return float(problem.verification["gold"] == answer)
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"import no_such_library\n{RAISES}", ["no_such_library", "own_rewards.py:1"]),
        (RAISES, ["reward.mine", "kind mine", "answer ''", "KeyError: 'gold'", "own_rewards.py:8"]),
    ],
    ids=["does not import", "raises on the first answer"],
)
def test_a_broken_reward_plug_in_is_found_before_a_role_starts(project, monkeypatch, source, words):
    # given a package with a reward of one's own
    packages = project.folder / "packages"
    packages.mkdir()
    entry_points = "[runspec.rewards]\nmine = own_rewards:Term\n"
    install(packages, monkeypatch, "own_rewards", entry_points, source)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    # when problems are graded by it, then apply ends with what it raises, and where
    project.replace(MATH, "- {name: mine, kind: mine}")
    project.write_rows([{**row, "task_type": "mine"} for row in ROWS])
    project.refuses(*words)


@pytest.mark.parametrize(
    ("hf", "files", "said"),
    [
        ("mine", [], "no directory"),
        ("./mine", ["tokenizer.json"], "mine has no config.json, no *.safetensors"),
        ("./mine", ["config.json", "model.safetensors"], "mine has no tokenizer.json"),
    ],
)
def test_a_model_that_is_not_whole_is_not_looked_for_in_a_registry(project, hf, files, said):
    model = ROOT / "runspec" / "lint" / "examples" / "models" / "small"
    for name in files:
        (project.folder / "mine").mkdir(exist_ok=True)
        text = (model / name).read_text() if (model / name).exists() else 8 * "\0"
        (project.folder / "mine" / name).write_text(text)
    project.name_model(hf)
    done = runspec("apply", project.spec, "--runs-dir", project.folder / "runs")
    assert "".join(said.split()) in "".join(done.stderr.split()), done.stderr
    assert "model.hf" in done.stderr and "hf download" not in done.stderr
    assert done.returncode == 1 and not (project.folder / "runs").exists()


@pytest.mark.usefixtures("unread_problems")
def test_a_port_that_is_taken_and_a_spec_that_is_not_there_are_named(project):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        project.refuses(f"port {port} is taken", sets=(f"placement.base_port={port}",))
    refused(runspec("apply", project.folder / "spek.yaml"), "spek.yaml", "no file")


def test_a_full_run_on_a_laptop_says_in_one_screen_what_is_missing(tmp_path):
    # given the full TARGET-LONG and a machine without a TPU
    spec = ROOT / "specs" / "target_long.yaml"
    done = runspec("apply", spec, "--runs-dir", tmp_path / "runs")
    # then everything that is missing is said at once, with a way out
    refused(done, "tpu-v5p x 4", "h100-80g x 8", "Qwen/QwQ-32B")
    assert f"runspec apply {spec} --profile laptop" in done.stderr
    assert len(done.stderr.splitlines()) <= 24
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_says_so_and_takes_no_other_spec(finished):
    words = ("apply", *SMALL, "--set", "steps=5", "--runs-dir", finished)
    done = runspec(*words, "--set", "algorithm.updates_per_step=1")
    assert "warning stale-pi-old: algorithm.old_logprobs" in done.stderr.splitlines()[0]
    done = runspec(*words)
    assert done.returncode == 0, done.stderr
    assert "small is finished: all 5 steps are trained." in done.stdout
    assert f"{finished / 'small' / 'report.html'}" in done.stdout
    refused(runspec(*words, "--set", "seed=7"), "seed: 42 there, 7 now")


@pytest.mark.usefixtures("unread_problems")
def test_a_detached_start_that_fails_shows_the_supervisor_s_last_words(tmp_path):
    # given a run whose first stage cannot write its log
    (tmp_path / "small" / "logs" / "warm-start.log").mkdir(parents=True)
    done = runspec("apply", *SMALL, "--runs-dir", tmp_path, "--detach")
    refused(done, "warm-start.log")


@contextmanager
def bound() -> Iterator[None]:
    """Permissions bind this thread, even root's: it goes without two of root's capabilities."""
    libc = ctypes.CDLL(None, use_errno=True)
    this_thread, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(this_thread, sets) == 0
    effective = sets[0]
    sets[0] = effective & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(this_thread, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(this_thread, sets) == 0


def names_folder(done: CompletedProcess[str], place: Path, reason: str) -> None:
    refused(done, f"error: {place}", reason, "remedy:")


@pytest.mark.usefixtures("unread_problems")
@pytest.mark.parametrize(
    ("words", "at"),
    [
        (("apply", *SMALL, "--runs-dir", "HERE"), "small"),
        (("apply", *SMALL, "--set", "storage.dir=HERE"), "small"),
        (("apply", *SMALL, "--runs-dir", "RUNS", "--set", "checkpoints.dir=HERE"), "small/state"),
        (("plan", *SMALL, "-o", "HERE/mine.plan"), "mine.plan"),
        (("init", "HERE"), ""),
    ],
)
def test_a_folder_that_cannot_be_written(tmp_path, words, at):
    closed, file, runs = (tmp_path / name for name in ("closed", "file", "runs"))
    closed.mkdir(mode=0o555)
    file.touch()
    for here, reason in ((closed, "Permission denied"), (file / "below", "Not a directory")):
        said = [str(word).replace("HERE", str(here)).replace("RUNS", str(runs)) for word in words]
        with bound():
            names_folder(runspec(*said), here / at, reason)
        # and nothing was made
        assert list(closed.iterdir()) == []
        assert not (runs / "small").exists()


@pytest.mark.usefixtures("unread_problems")
def test_a_folder_of_the_run_itself_that_cannot_be_written(tmp_path):
    with prepared(small_spec(), tmp_path) as run:
        folders = [run.directory / name for name in ("keys", "logs", "weights")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        mode = folder.stat().st_mode
        folder.chmod(0o555)
        with bound():
            done = runspec("resume", "small", "--runs-dir", tmp_path)
        names_folder(done, folder, "Permission denied")
        folder.chmod(mode)
    shutil.rmtree(folders[0])
    folders[0].touch()
    names_folder(runspec("resume", "small", "--runs-dir", tmp_path), folders[0], FILE_THERE)


@pytest.mark.usefixtures("unread_problems")
def test_places_beside_a_run_and_a_spec_that_cannot_be_written(tmp_path):
    # given a file where the run's directory would be
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "small").touch()
    names_folder(runspec("apply", *SMALL, "--runs-dir", runs), runs / "small", FILE_THERE)
    (runs / "small").unlink()
    # and folders without rights: of the warm start's cache, and of a spec's lock
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    spec = tmp_path / "specs" / "target_short.yaml"
    for folder in (tmp_path, tmp_path / "specs"):
        folder.chmod(0o555)
    with bound():
        done = runspec("apply", *SMALL, "--runs-dir", runs)
        names_folder(done, tmp_path / ".cache" / "warm_start", "Permission denied")
        done = runspec("lock", spec, "--profile", "laptop")
        names_folder(done, tmp_path / "specs", "Permission denied")
    assert list(runs.iterdir()) == []
    # and runs that nobody may look into
    with prepared(small_spec(), runs):
        pass
    runs.chmod(0o600)
    with bound():
        for words in (("apply", *SMALL), ("plan", *SMALL), ("status", "small")):
            names_folder(runspec(*words, "--runs-dir", runs), runs, "Permission denied")
    for folder in (tmp_path, tmp_path / "specs", runs):
        folder.chmod(0o755)


@contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("unread_problems")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("closed port", "Could not connect"),
        ("silence", "no answer in 1 s"),
        ("no bucket", "NoSuchBucket"),
        ("no driver", "tensorstore"),
    ],
)
def test_an_object_store_that_cannot_be_used(tmp_path, monkeypatch, wrong, reason):
    monkeypatch.setitem(files.RETRIES, "max_retries", 1)
    with s3_server() as environment, silent_server() as silent:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if wrong == "closed port":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        elif wrong == "silence":
            monkeypatch.setenv("AWS_ENDPOINT_URL", silent)
            monkeypatch.setattr(files, "DEADLINE_S", 1.0)
        elif wrong == "no driver":
            monkeypatch.setitem(sys.modules, "tensorstore", None)
        folder = ("--set", "checkpoints.dir=s3://nobody-has-it/checkpoints")
        done = runspec("apply", *SMALL, "--runs-dir", tmp_path / "runs", *folder)
    names_folder(done, Path("checkpoints.dir"), reason)
    assert not (tmp_path / "runs" / "small").exists()
