"""What a lock pins, and what it notices afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from runspec.cli.spec_files import located
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.spec import lock_file
from runspec.core.spec.load import SpecFiles, load_layers
from runspec.core.spec.lock_file import LOCK_VERSION, Lock, lock_path, read_lock, write_lock
from runspec.core.spec.schema import RunSpec
from runspec.lint.check import check_spec
from runspec.lock.pins import check_lock, find_pins
from tests.runspec.core.spec.spec_files import DOCUMENTS, small_spec, write
from tests.runspec.lock.repository import COMMIT, OTHER, cache, write_model, write_weights

LOCAL = "model: {hf: policy}"
ON_HUB = "model: {hf: some/model}"


def resolved(path: Path, *overrides: str) -> RunSpec:
    spec = load_layers(SpecFiles(path, overrides=overrides), environ={}).spec
    assert spec is not None
    return spec


def lock(path: Path, *overrides: str, env: Mapping[str, str] | None = None) -> Lock:
    """Locks a spec as the command does."""
    spec = resolved(path, *overrides)
    made = Lock(version=LOCK_VERSION, pins=find_pins(spec, path.parent, env or {}).pins)
    write_lock(made, path)
    assert read_lock(path) == made
    return made


def stale(path: Path, *overrides: str, env: Mapping[str, str] | None = None) -> list[str]:
    return check_lock(resolved(path, *overrides), path, env=env or {})


def test_a_directory_is_pinned_file_by_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "policy")
    made = lock(small_spec(tmp_path, LOCAL))
    pin = made.pins.get("model")
    assert pin is not None and (pin.source, pin.commit) == ("policy", None)
    assert {name: file.blake3 for name, file in pin.files.items()} == {
        name: digest_bytes((folder / name).read_bytes())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    }
    assert stale(tmp_path / "spec.yaml") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: (m / "config.json").write_text("{}"), "config.json is not the file of the lock"),
        (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json is in the lock, and not here"),
        (lambda m: write_weights(m / "model.safetensors", b"4321"), "model.safetensors is not the"),
        (
            lambda m: (m / "chat_template.jinja").write_text("other"),
            "chat_template.jinja is not in the lock",
        ),
    ],
)
def test_a_file_that_changed_is_named(tmp_path: Path, change: object, said: str) -> None:
    folder = write_model(tmp_path / "policy")
    path = small_spec(tmp_path, LOCAL)
    lock(path)
    assert callable(change)
    change(folder)
    assert any(sentence.startswith(f"model: {said}") for sentence in stale(path)), stale(path)


def test_large_weights_are_pinned_by_their_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_file, "WHOLE_BYTES", 10)
    folder = write_model(tmp_path / "policy")
    path = small_spec(tmp_path, LOCAL)
    made = lock(path)
    assert "model" in made.pins
    pin = made.pins["model"].files["model.safetensors"]
    assert pin.blake3 is None and pin.header is not None
    # then a value may change unseen, a tensor's name may not
    write_weights(folder / "model.safetensors", b"4321")
    assert stale(path) == []
    write_weights(folder / "model.safetensors", b"4321", name="b")
    assert "model.safetensors is not the file of the lock" in stale(path)[0]


def test_the_model_beside_the_spec_is_pinned_as_the_run_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given models of one name beside the spec and where the process runs
    write_model(tmp_path / "specs/policy")
    write_model(tmp_path / "policy")
    (tmp_path / "policy/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    path = small_spec(tmp_path / "specs", LOCAL)
    # when it is locked
    made = lock(path)
    # then the run's own is in the lock, from wherever it is checked
    assert located(resolved(path), path.parent).model.hf == str(tmp_path / "specs/policy")
    assert "model" in made.pins
    own = digest_bytes((tmp_path / "specs/policy/config.json").read_bytes())
    assert made.pins["model"].files["config.json"].blake3 == own
    monkeypatch.chdir(tmp_path / "specs")
    assert stale(path) == []


def test_a_repository_is_pinned_by_the_commit_in_the_cache(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "home")}
    write_model(cache(tmp_path / "home"))
    path = small_spec(tmp_path, ON_HUB)
    made = lock(path, env=env)
    assert made.pins["model"].commit == COMMIT
    assert "config.json" in made.pins["model"].files
    # when main has moved on in the cache
    write_model(cache(tmp_path / "home", commit=OTHER))
    assert stale(path, env=env) == [f"model: commit {OTHER}, and {COMMIT} in the lock"]
    # then the old commit is still there by name
    assert stale(path, f"model.revision={COMMIT}", env=env) == []
    assert stale(path, f"model.revision={OTHER}", env=env) != []
    # and where neither is, only what the spec says is compared
    assert stale(path) == []
    assert stale(path, f"model.revision={OTHER}") == [
        f"model: commit {OTHER}, and {COMMIT} in the lock"
    ]


def test_another_tokenizer_has_a_pin_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "policy")
    write_model(tmp_path / "words", template="other")
    path = small_spec(tmp_path, "model: {hf: policy, tokenizer: {hf: words}}")
    made = lock(path)
    assert "model.tokenizer" in made.pins
    assert set(made.pins["model.tokenizer"].files) == {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    assert "model.tokenizer: tokenizer.json is not the file" in stale(path)[0]


def test_generators_are_pinned_by_package(tmp_path: Path) -> None:
    write_model(tmp_path / "policy")
    path = small_spec(tmp_path, LOCAL)
    pin = lock(path).pins["data.sources.words"]
    assert pin.package is not None and pin.package.startswith("reasoning-gym ")
    # given another version of the package when it was locked
    text = lock_path(path).read_text().replace(pin.package, "reasoning-gym 0.0.1")
    lock_path(path).write_text(text)
    assert stale(path) == [
        f"data.sources.words: {pin.package}, and reasoning-gym 0.0.1 in the lock"
    ]


def test_local_data_is_pinned_file_by_file(tmp_path: Path) -> None:
    write_model(tmp_path / "policy")
    rows = write(tmp_path / "rows" / "part" / "a.parquet", "rows")
    write(tmp_path / "rows" / ".hidden", "x")
    source = "data.sources=[{name: rows, kind: parquet, uri: rows}]"
    path = small_spec(tmp_path, LOCAL)
    assert set(lock(path, source).pins["data.sources.rows"].files) == {"part/a.parquet"}
    rows.write_text("other rows")
    assert stale(path, source) == [
        "data.sources.rows: part/a.parquet is not the file of the lock: 10 bytes, 4 in the lock"
    ]
    write(tmp_path / "rows" / "b.parquet", "more")
    assert "data.sources.rows: b.parquet is not in the lock" in stale(path, source)
    # of a pattern, what it matches
    pattern = source.replace("uri: rows", "uri: 'rows/b*.parquet'")
    assert set(lock(path, pattern).pins["data.sources.rows"].files) == {"b.parquet"}


def test_generated_reads_are_pinned_by_our_own_package(tmp_path: Path) -> None:
    path = Path(shutil.copy(DOCUMENTS, tmp_path / "spec.yaml"))
    shutil.copytree(DOCUMENTS.parent / "models" / "bases", tmp_path / "models" / "bases")
    pins = lock(path).pins
    package = pins["data.sources.reads"].package
    assert package is not None and package.startswith("runspec-rl ")
    assert set(pins["model.tokenizer"].files) == {"tokenizer.json", "tokenizer_config.json"}
    assert stale(path) == []


def test_data_on_the_hub_is_pinned_by_its_commit(tmp_path: Path) -> None:
    write_model(tmp_path / "policy")
    env = {"HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
    cache(tmp_path / "home", "datasets--some--data")
    source = "data.sources=[{name: rows, kind: parquet, uri: 'hf://datasets/some/data/train'}]"
    path = small_spec(tmp_path, LOCAL)
    assert lock(path, source, env=env).pins["data.sources.rows"].commit == COMMIT
    cache(tmp_path / "home", "datasets--some--data", OTHER)
    assert stale(path, source, env=env) == [
        f"data.sources.rows: commit {OTHER}, and {COMMIT} in the lock"
    ]


def test_what_is_neither_here_nor_in_the_spec_is_left_open(tmp_path: Path) -> None:
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
    assert list(seen.open) == ["data.sources.web"]
    assert list(seen.unknown) == []
    assert list(find_pins(resolved(path, "model.hf=some/model"), tmp_path, {}).unknown) == ["model"]


def test_the_rule_on_revisions_takes_the_locks_commit(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "home")}
    write_model(cache(tmp_path / "home"))
    path = small_spec(tmp_path, ON_HUB)
    codes = [finding.code for finding in check_spec(SpecFiles(path), environ={}).findings]
    assert codes == ["unknown-model", "unpinned-revision"]
    lock(path, env=env)
    codes = [finding.code for finding in check_spec(SpecFiles(path), environ={}).findings]
    assert codes == ["unknown-model"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty file"),
        ("- 1", "no lock: Input should be a valid dict"),
        ("version: [", "broken YAML"),
        ("version: runspec-lock/v9", "version: Input should be 'runspec-lock/v2'"),
        ("version: runspec-lock/v2\nextra: 1", ":2:8: no lock: extra"),
        ("version: runspec-lock/v2\npins: {model: {source: a, commit: main}}", "pins.model.commit"),
        ("version: runspec-lock/v2\npins: {model: {source: a, files: {b: {}}}}", "files.b.size"),
        ("version: !!python/none x", "tag"),
        ("a: " + "x" * 300_000, "larger than"),
        (b"\xff", "cannot read the lock"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_whole(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    lock_path(tmp_path / "spec.yaml").write_bytes(data)
    with pytest.raises(UserError) as raised:
        read_lock(tmp_path / "spec.yaml")
    assert said in str(raised.value)


def test_a_lock_among_the_specs_is_linted_as_what_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "policy")
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
