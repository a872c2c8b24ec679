"""How layers become one spec: merging, named lists, nulls, variables, and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.errors import UserError
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import lines, load, small_spec, write


def test_maps_merge_and_plain_lists_are_replaced(tmp_path: Path) -> None:
    path = small_spec(
        tmp_path,
        """
        algorithm: {kl: {coef: 0.5}}
        optimizer: {betas: [0.8, 0.9]}
        reward: [{name: length, targets: [4]}]
        """,
    )
    spec = load(path).require()
    assert (spec.algorithm.kl.coef, spec.algorithm.group_size) == (0.5, 4)
    assert (spec.optimizer.betas, spec.optimizer.lr) == ((0.8, 0.9), 1e-3)
    assert spec.reward[1].targets == [4]


def test_lists_of_named_objects_merge_by_name(tmp_path: Path) -> None:
    path = small_spec(
        tmp_path,
        "samplers: [{name: more, hardware: {kind: cpu}, max_model_len: 90, max_new_tokens: 40},"
        " {name: pool, replicas: 2}]",
    )
    pools = load(path).require().samplers
    assert [(pool.name, pool.replicas, pool.max_new_tokens) for pool in pools] == [
        ("pool", 2, 48),
        ("more", 1, 40),
    ]


def test_a_named_list_may_be_written_as_a_map_where_null_deletes(tmp_path: Path) -> None:
    path = small_spec(
        tmp_path,
        """
        reward: {spelling: null, graded: {kind: reasoning_gym}, length: {alpha: 0.2}}
        broadcast: {relays: {eu: {}, us: {upstream: [eu]}}}
        """,
    )
    spec = load(path).require()
    assert [(term.name, term.alpha) for term in spec.reward] == [("length", 0.2), ("graded", None)]
    assert [relay.name for relay in spec.broadcast.relays] == ["eu", "us"]


def test_null_deletes_and_the_default_comes_back(tmp_path: Path) -> None:
    path = small_spec(tmp_path, "algorithm: {group_size: null, updates_per_step: 1}")
    assert load(path).require().algorithm.group_size == 16


def test_null_is_a_value_where_a_key_can_be_null(tmp_path: Path) -> None:
    # given a bound whose default is not null, taken away, and set again by a later layer
    path = small_spec(tmp_path, "algorithm: {clip: {delta: null}}")
    assert load(path).require().algorithm.clip.delta is None
    assert load(path, "algorithm.clip.delta=6.0").require().algorithm.clip.delta == 6.0
    assert load(path, "algorithm.clip=").require().algorithm.clip.delta == 4.0


def test_extends_comes_first_then_the_profile_then_set(tmp_path: Path) -> None:
    write(tmp_path / "one.yaml", "steps: 10\nseed: 10\nname: one\noptimizer: {lr: 1.0}")
    write(tmp_path / "two.yaml", "extends: [deep/three.yaml]\nsteps: 20")
    write(tmp_path / "deep/three.yaml", "steps: 30\nseed: 30")
    path = small_spec(tmp_path)
    path.write_text("extends: [base.yaml, one.yaml, two.yaml]\nname: top\n")
    write(tmp_path / "profiles/fast.yaml", "steps: 40")

    plain = load(path).require()
    assert (plain.name, plain.seed, plain.steps, plain.optimizer.lr) == ("top", 30, 20, 1.0)
    assert load(path, profile="fast").require().steps == 40
    assert load(path, "steps=50", "steps=60", profile="fast").require().steps == 60


def test_set_takes_yaml_values_and_addresses_named_objects(tmp_path: Path) -> None:
    spec = load(
        small_spec(tmp_path),
        "optimizer.lr=1e-6",
        "optimizer.betas=[0.5, 0.6]",
        "samplers.pool.dtype=float32",
        "algorithm.clip={delta: 5}",
        "reward.length.alpha=0.25",
        "verify.lease_timeout=90s",
        "model.revision=",
    ).require()
    assert spec.optimizer.lr == 1e-6
    assert spec.optimizer.betas == (0.5, 0.6)
    assert spec.samplers[0].dtype == "float32"
    assert spec.algorithm.clip.delta == 5.0
    assert spec.reward[1].alpha == 0.25
    assert spec.verify.lease_timeout == 90.0


def test_variables_fill_values_and_only_values(tmp_path: Path) -> None:
    path = small_spec(
        tmp_path,
        """
        steps: ${STEPS}
        model: {hf: "models/${WHO:?say whose}/small"}
        data: {length_prompt: "${STEPS} {target}"}
        """,
    )
    spec = load(path, STEPS="7", WHO="ours").require()
    assert (spec.steps, spec.model.hf) == (7, "models/ours/small")
    assert spec.data.length_prompt == "7 {target}"


@pytest.mark.parametrize(
    ("overlay", "environ", "expected"),
    [
        ("steps: ${NO}", {}, "2:8: error variable: steps: variable NO is not set"),
        ("name: ${V:?a name}", {"V": ""}, "2:7: error variable: name: variable V is empty: a name"),
        ("name: ${V:?a name}", {}, "2:7: error variable: name: variable V is not set: a name"),
        ("name: a${V", {}, "2:7: error variable: name: a variable is written ${NAME} or"),
        ("steps: ${V}", {"V": "9" * 80}, "2:8: error variable: steps: a number of 80 characters"),
        ("steps: ${V}", {"V": "[1]"}, "2:8: error wrong-type: steps: a whole number was expected"),
    ],
)
def test_variables_that_cannot_be_filled_are_one_finding(
    tmp_path: Path, overlay: str, environ: dict[str, str], expected: str
) -> None:
    loaded = load(small_spec(tmp_path, overlay), **environ)
    assert len(loaded.findings) == 1
    assert lines(loaded, tmp_path)[0].startswith(f"spec.yaml:{expected}")


def test_a_secret_never_becomes_a_value(tmp_path: Path) -> None:
    path = small_spec(
        tmp_path,
        """\
        secrets: [{name: token, from: {env: TOKEN}}]
        model: {hf: "https://${TOKEN}@host/model"}
        """,
    )
    loaded = load(path, TOKEN="hunter2")
    [finding] = loaded.findings
    assert (finding.code, finding.line, finding.column) == ("secret-value", 3, 13)
    assert "hunter2" not in str(finding)


@pytest.mark.parametrize(
    ("extends", "expected"),
    [
        ("[gone.yaml]", "1:11: error extends: extends: no file"),
        ("[circle.yaml]", "1:11: error extends: extends: no file"),
        (f"[{'a' * 300}.yaml]", "1:11: error extends: extends: cannot read"),
        ("[/etc/passwd]", "1:11: error extends: extends: '/etc/passwd' is no .yaml file"),
        ("[secret.yaml]", "1:11: error extends: extends: 'secret.yaml' is no .yaml file"),
        ("base.yaml", "1:10: error extends: extends: a list of files was expected"),
        ("[[base.yaml]]", "1:11: error extends: extends: a file name was expected"),
        ("[base.yaml, spec.yaml]", "1:22: error extends: extends: a cycle: spec.yaml -> spec.yaml"),
    ],
)
def test_bad_extends_are_named_at_the_file_name(
    tmp_path: Path, extends: str, expected: str
) -> None:
    path = small_spec(tmp_path)
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    write(tmp_path / "credentials", "password: hunter2 : x")
    (tmp_path / "secret.yaml").symlink_to("credentials")
    path.write_text(f"extends: {extends}\n")
    loaded = load(path)
    assert loaded.spec is None
    assert [line[: len("spec.yaml:" + expected)] for line in lines(loaded, tmp_path)] == [
        f"spec.yaml:{expected}"
    ]


def test_a_cycle_over_two_files_and_a_fan_of_files_both_end(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: [b.yaml]")
    write(tmp_path / "b.yaml", "extends: [a.yaml]")
    assert "a.yaml -> b.yaml -> a.yaml" in load(tmp_path / "a.yaml").findings[0].message

    for i in range(8):
        write(tmp_path / f"f{i}.yaml", f"extends: [{', '.join([f'f{i + 1}.yaml'] * 5)}]")
    write(tmp_path / "f8.yaml", "steps: 1")
    assert "more than 32 files" in load(tmp_path / "f0.yaml").findings[0].message


@pytest.mark.parametrize(
    ("override", "remedy"),
    [("steps", "path=value"), ("=3", "path=value"), ("a..b=3", "path=value"), ("a b=1", "no path")],
)
def test_an_override_that_is_no_path_and_value_is_bad_usage(
    tmp_path: Path, override: str, remedy: str
) -> None:
    with pytest.raises(UserError, match=remedy):
        load(small_spec(tmp_path), override)


def test_nothing_to_look_at_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        load(tmp_path / "gone.yaml")
    with pytest.raises(UserError, match="no regular file"):
        load(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        load(tmp_path / ("a" * 300))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")
    path = small_spec(tmp_path)
    write(tmp_path / "profiles/fast.yaml", "steps: 1")
    for name in ("slow", "../fast"):
        with pytest.raises(UserError, match="there are: fast"):
            load(path, profile=name)


def test_a_profile_that_is_not_there_is_said_with_folder_and_near_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a spec that is named by a relative path, as on a command line
    monkeypatch.chdir(tmp_path)
    spec = small_spec(tmp_path).name
    # when there is no folder, then it is named whole
    none = runspec("lint", spec, "--profile", "laptop")
    assert none.returncode == 2
    assert f"no profile 'laptop' in {tmp_path}/profiles; there are: none" in none.stderr
    # when there is one with a name that is nearly the one meant, then that is named
    write(tmp_path / "profiles/laptop.yaml", "steps: 1")
    write(tmp_path / "profiles/node.yaml", "steps: 1")
    near = runspec("plan", spec, "--profile", "latop")
    assert near.returncode == 2
    assert "there are: laptop, node" in near.stderr and "did you mean laptop?" in near.stderr
