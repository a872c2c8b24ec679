"""What a lock pins, what it notices afterwards, and what `runspec lock` and `apply` make of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.checks import located
from runspec.cli.lint import lock_command
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec, lock_file
from runspec.core.schema.load import SpecFiles, load_layers
from runspec.core.schema.lock_file import LOCK_VERSION, Lock, lock_path, read_lock, write_lock
from runspec.lint.check import check_spec
from runspec.lock import check_lock, find_pins
from tests.runspec.core.schema.spec_files import DOCUMENTS, SPECS, codes, load, small_spec, write
from tests.runspec.lock.repository import COMMIT, OTHER, cache, write_model, write_weights

LOCAL = "model: {hf: policy}"
ON_HUB = "model: {hf: some/model}"
MOVED = f"commit {OTHER}, and {COMMIT} in the lock"
Env = Mapping[str, str] | None


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Nothing is taken from this machine's cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.fixture
def policy(tmp_path):
    """The directory of a model beside the spec."""
    return write_model(tmp_path / "policy")


def resolved(path: Path, *overrides: str) -> RunSpec:
    return load_layers(SpecFiles(path, overrides=overrides), environ={}).require()


def lock(path: Path, *overrides: str, env: Env = None) -> Lock:
    """Locks a spec as the command does."""
    spec = resolved(path, *overrides)
    made = Lock(version=LOCK_VERSION, pins=find_pins(spec, path.parent, env or {}).pins)
    write_lock(made, path)
    assert read_lock(path) == made
    return made


def stale(path: Path, *overrides: str, env: Env = None) -> list[str]:
    return check_lock(resolved(path, *overrides), path, env=env or {})


def test_a_directory_is_pinned_file_by_file(tmp_path, policy):
    pin = lock(small_spec(tmp_path, LOCAL)).pins["model"]
    assert (pin.source, pin.commit) == ("policy", None)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    assert {name: file.blake3 for name, file in pin.files.items()} == {
        name: digest_bytes((policy / name).read_bytes()) for name in names
    }
    assert stale(tmp_path / "spec.yaml") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json is in the lock, and not here"),
        (lambda m: write_weights(m / "model.safetensors", b"4321"), "model.safetensors is not the"),
        (lambda m: (m / "chat_template.jinja").touch(), "chat_template.jinja is not in the lock"),
    ],
)
def test_a_file_that_changed_is_named(tmp_path, policy, change, said):
    path = small_spec(tmp_path, LOCAL)
    lock(path)
    change(policy)
    assert any(sentence.startswith(f"model: {said}") for sentence in stale(path)), stale(path)


def test_large_weights_are_pinned_by_their_header(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(lock_file, "WHOLE_BYTES", 10)
    path = small_spec(tmp_path, LOCAL)
    pin = lock(path).pins["model"].files["model.safetensors"]
    assert pin.blake3 is None and pin.header is not None
    # then a value may change unseen, a tensor's name may not
    write_weights(policy / "model.safetensors", b"4321")
    assert stale(path) == []
    write_weights(policy / "model.safetensors", b"4321", name="b")
    assert "model.safetensors is not the file of the lock" in stale(path)[0]


def test_the_model_beside_the_spec_is_pinned_as_the_run_takes_it(tmp_path, policy, monkeypatch):
    # given models of one name beside the spec and where the process runs
    beside = write_model(tmp_path / "specs/policy")
    (policy / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    path = small_spec(tmp_path / "specs", LOCAL)
    # when it is locked, then the run's own is in the lock, from wherever it is checked
    pin = lock(path).pins["model"].files["config.json"]
    assert located(resolved(path), path.parent).model.hf == str(beside)
    assert pin.blake3 == digest_bytes((beside / "config.json").read_bytes())
    monkeypatch.chdir(tmp_path / "specs")
    assert stale(path) == []


def test_a_repository_is_pinned_by_the_commit_in_the_cache(tmp_path):
    env = {"HF_HOME": str(tmp_path / "home")}
    write_model(cache(tmp_path / "home"))
    path = small_spec(tmp_path, ON_HUB)
    # the rule on revisions takes the lock's commit
    assert codes(load(path)) == ["unknown-model", "unpinned-revision"]
    pin = lock(path, env=env).pins["model"]
    assert pin.commit == COMMIT and "config.json" in pin.files
    assert codes(load(path)) == ["unknown-model"]
    # when main has moved on in the cache, then the old commit is still there by name
    write_model(cache(tmp_path / "home", commit=OTHER))
    assert stale(path, env=env) == [f"model: {MOVED}"]
    assert stale(path, f"model.revision={COMMIT}", env=env) == []
    assert stale(path, f"model.revision={OTHER}", env=env) != []
    # and where neither is, only what the spec says is compared
    assert stale(path) == []
    assert stale(path, f"model.revision={OTHER}") == [f"model: {MOVED}"]


def test_another_tokenizer_has_a_pin_of_its_own(tmp_path, policy):
    words = write_model(tmp_path / "words", template="other")
    path = small_spec(tmp_path, "model: {hf: policy, tokenizer: {hf: words}}")
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert set(lock(path).pins["model.tokenizer"].files) == names
    (words / "tokenizer.json").write_text("{}")
    assert "model.tokenizer: tokenizer.json is not the file" in stale(path)[0]


def test_generators_are_pinned_by_package(tmp_path, policy):
    path = small_spec(tmp_path, LOCAL)
    package = lock(path).pins["data.sources.words"].package
    assert package is not None and package.startswith("reasoning-gym ")
    # given another version of the package when it was locked
    lock_path(path).write_text(lock_path(path).read_text().replace(package, "reasoning-gym 0.0.1"))
    assert stale(path) == [f"data.sources.words: {package}, and reasoning-gym 0.0.1 in the lock"]
    # and reads that we generate by our own package
    spec = Path(shutil.copy(DOCUMENTS, tmp_path / "documents.yaml"))
    shutil.copytree(DOCUMENTS.parent / "models" / "bases", tmp_path / "models" / "bases")
    pins = lock(spec).pins
    assert str(pins["data.sources.reads"].package).startswith("runspec-rl ")
    assert set(pins["model.tokenizer"].files) == {"tokenizer.json", "tokenizer_config.json"}
    assert stale(spec) == []


def test_local_data_is_pinned_file_by_file_and_that_on_the_hub_by_its_commit(tmp_path, policy):
    rows = write(tmp_path / "rows" / "part" / "a.parquet", "rows")
    write(tmp_path / "rows" / ".hidden", "x")
    source = "data.sources=[{name: rows, kind: parquet, uri: rows}]"
    path, name = small_spec(tmp_path, LOCAL), "data.sources.rows"
    assert set(lock(path, source).pins[name].files) == {"part/a.parquet"}
    rows.write_text("other rows")
    changed = f"{name}: part/a.parquet is not the file of the lock: 10 bytes, 4 in the lock"
    assert stale(path, source) == [changed]
    write(tmp_path / "rows" / "b.parquet", "more")
    assert f"{name}: b.parquet is not in the lock" in stale(path, source)
    # of a pattern, what it matches
    pattern = source.replace("uri: rows", "uri: 'rows/b*.parquet'")
    assert set(lock(path, pattern).pins[name].files) == {"b.parquet"}
    # and on the hub
    env = {"HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
    cache(tmp_path / "home", "datasets--some--data")
    hub = source.replace("uri: rows", "uri: 'hf://datasets/some/data/train'")
    assert lock(path, hub, env=env).pins[name].commit == COMMIT
    cache(tmp_path / "home", "datasets--some--data", OTHER)
    assert stale(path, hub, env=env) == [f"{name}: {MOVED}"]


def test_what_is_neither_here_nor_in_the_spec_is_left_open(tmp_path):
    path = small_spec(
        tmp_path,
        """
        model: {hf: ./policy}
        data: {sources: [{name: web, kind: parquet, uri: "https://example.org/a.parquet"},
                         {name: file, kind: parquet, uri: gone.parquet},
                         {name: odd, kind: abacus},
                         {name: hub, kind: parquet, uri: "hf://datasets/"}]}
        """,
    )
    seen = find_pins(resolved(path), path.parent, {})
    assert seen.absent == {
        "model": "no config.json in ./policy",
        "data.sources.file": "no file gone.parquet",
        "data.sources.odd": "no installed package makes kind abacus",
        "data.sources.hub": "no repository in hf://datasets/",
    }
    assert (list(seen.open), list(seen.unknown)) == (["data.sources.web"], [])
    assert list(find_pins(resolved(path, "model.hf=some/model"), tmp_path, {}).unknown) == ["model"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty file"),
        ("version: [", "broken YAML"),
        ("version: runspec-lock/v2\nextra: 1", ":2:8: no lock: extra"),
        ("a: " + "x" * 300_000, "larger than"),
        ("\udcff", "cannot read the lock"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_whole(tmp_path, text, said):
    lock_path(tmp_path / "spec.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError) as raised:
        read_lock(tmp_path / "spec.yaml")
    assert said in str(raised.value)


def test_a_lock_among_the_specs_is_linted_as_what_it_is(tmp_path, policy):
    path = small_spec(tmp_path, LOCAL)
    lock(path)
    checked = check_spec(SpecFiles(lock_path(path)), environ={})
    assert checked.findings == []
    with pytest.raises(UserError, match="a file of kind Lock, which is no spec"):
        checked.require()
    lock_path(path).write_text("version: runspec-lock/v2\npins: {model: {sauce: policy}}\n")
    found = check_spec(SpecFiles(lock_path(path)), environ={}).findings
    assert [(f.code, f.path, f.line) for f in found] == [
        ("bad-value", "pins.model.source", 2),
        ("bad-value", "pins.model.sauce", 2),
    ]


def test_the_command_writes_a_lock_that_holds(tmp_path, policy, capsys):
    web = "data.sources=[{name: web, kind: parquet, uri: 'https://example.org/a.parquet'}]"
    files = SpecFiles(small_spec(tmp_path, LOCAL), overrides=[web])
    assert lock_command(*astuple(files), check=False) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {tmp_path}/spec.lock.yaml\n"
    assert "warning: data.sources.web: https://example.org" in said.err  # no lock can hold it
    assert lock_command(*astuple(files), check=True) == 0
    assert "holds" in capsys.readouterr().out
    # when the model changes under its name
    (policy / "config.json").write_text("{}")
    assert lock_command(*astuple(files), check=True) == 1
    assert capsys.readouterr().out.startswith("model: config.json is not the file of the lock")


def test_a_name_that_cannot_be_pinned_leaves_nothing_written(tmp_path, capsys):
    path = small_spec(tmp_path, ON_HUB)
    assert lock_command(path) == 1
    said = capsys.readouterr().err
    assert "error: model: the commit of some/model is not known: name it as `revision`" in said
    assert "nothing was written" in said and read_lock(path) is None


def test_apply_refuses_what_is_not_what_was_locked(tmp_path):
    # given a lock of the laptop's data, and another data set than it has
    layers = f"extends: [{SPECS}/target_short.yaml, {SPECS}/profiles/laptop.yaml]"
    spec = write(tmp_path / "spec.yaml", layers)
    assert lock_command(spec) == 0
    other = ["data.sources.spell_backward.dataset=letter_counting"]
    with pytest.raises(UserError, match=r"letter_counting, and spell_backward in the lock"):
        apply_command(spec, overrides=other, detach=True, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
