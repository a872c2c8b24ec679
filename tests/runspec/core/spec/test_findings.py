"""Findings: exact places, all in one pass, suggestions, and how they look."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.errors import UserError
from tests.runspec.core.spec.spec_files import lines, load, small_spec, write


def test_every_finding_is_reported_in_one_pass_at_its_exact_place(tmp_path: Path) -> None:
    path = small_spec(
        tmp_path,
        """\
        seed: -1
        algorithm:
          grop_size: 8
          group_size: "8"
          kl: 4
          advantage: {normalize: tsk}
        group_size: 3
        data:
          max_prompt_tokens: .inf
          sources: [{name: words, params: {a: [1]}}]
        optimizer: {lr: null, betas: [1.0]}
        verify: {lease_timeout: 60}
        samplers: {pol: null}
        """,
    )
    found = lines(load(path, "samplers.pool.dtype=float3"), tmp_path)
    assert sorted(found) == sorted(
        [
            "spec.yaml:2:7: error bad-value: seed: "
            "input should be greater than or equal to 0, got -1 "
            "(`runspec explain seed` says what is allowed)",
            "spec.yaml:4:3: error unknown-key: algorithm.grop_size: "
            "unknown key (did you mean group_size?)",
            "spec.yaml:5:15: error wrong-type: algorithm.group_size: "
            "a whole number was expected, got '8' (leave the quotes out)",
            "spec.yaml:6:7: error wrong-type: algorithm.kl: a map was expected, got 4 "
            "(`runspec explain algorithm.kl` says what belongs there)",
            "spec.yaml:7:26: error bad-value: algorithm.advantage.normalize: "
            "'std', 'task' or 'none' was expected, got 'tsk' (did you mean task?)",
            "spec.yaml:8:1: error unknown-key: group_size: "
            "unknown key (did you mean algorithm.group_size?)",
            "spec.yaml:10:22: error wrong-type: data.max_prompt_tokens: "
            "a whole number was expected, got inf "
            "(`runspec explain data.max_prompt_tokens` says what belongs there)",
            "spec.yaml:11:39: error wrong-type: data.sources.words.params.a: "
            "a single value was expected, got a list of 1 "
            "(`runspec explain data.sources.words.params.a` says what belongs there)",
            "spec.yaml:12:17: error missing-key: optimizer.lr: "
            "a required key is missing, deleted by this null "
            "(`runspec explain optimizer.lr` says what belongs there)",
            "spec.yaml:12:30: error missing-key: optimizer.betas.1: a value is missing "
            "(`runspec explain optimizer.betas` says what belongs there)",
            "spec.yaml:13:25: error unit: verify.lease_timeout: a duration with a unit was "
            "expected, like 500ms, 60s, 90m, 1.5h or 2d, got 60 "
            "(write the unit behind the number)",
            "spec.yaml:14:12: error unknown-name: samplers: "
            "no 'pol' to delete (did you mean pool?)",
            "--set:1:21: error bad-value: samplers.pool.dtype: "
            "'float32' or 'bfloat16' was expected, got 'float3' (did you mean float32?)",
        ]
    )


@pytest.mark.parametrize(
    ("overlay", "expected"),
    [
        ("modle: {}", "modle: unknown key (did you mean model?)"),
        ("model: {maxcontext: 1}", "model.maxcontext: unknown key (did you mean max_context?)"),
        ("samplers: [{name: pool, sampling: {temprature: 1}}]",
         "samplers.pool.sampling.temprature: unknown key (did you mean temperature?)"),
        ("broadcast: {relays: {eu: {urls: x}}}",
         "broadcast.relays.eu.urls: unknown key (did you mean url?)"),
        ("secrets: [{name: t, from: {envv: T}}]",
         "secrets.t.from.envv: unknown key (did you mean env?)"),
        ("verify: {xyz: 1}",
         "verify.xyz: unknown key (known here: validators, hardware, engine, "),
    ],
)  # fmt: skip
def test_unknown_keys_are_found_at_every_depth(tmp_path: Path, overlay: str, expected: str) -> None:
    found = lines(load(small_spec(tmp_path, overlay)), tmp_path)
    assert any(f"error unknown-key: {expected}" in line for line in found), found


def test_a_misspelt_key_is_found_even_where_null_or_a_later_layer_hides_it(tmp_path: Path) -> None:
    write(tmp_path / "profiles/p.yaml", "optimzer: null")
    loaded = load(small_spec(tmp_path, "optimzer: {lr: 1}"), profile="p")
    assert [line.split(": ")[0] for line in lines(loaded, tmp_path)] == [
        "spec.yaml:2:1",
        "profiles/p.yaml:1:1",
    ]


def test_require_lists_every_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 errors(.|\n)*spec.yaml:2:1(.|\n)*spec.yaml:3:1"):
        load(small_spec(tmp_path, "aa: 1\nbb: 2\n")).require()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("verify.lease_timeout=0s", "verify.lease_timeout: a duration above zero"),
        ("secrets=[{name: A=B, from: {env: T}}]", "secrets.A=B.name: string should match"),
        ("secrets=[{name: t, from: {env: ''}}]", "secrets.t.from.env: string should match"),
    ],
)
def test_values_that_no_process_could_use_are_found(
    tmp_path: Path, override: str, expected: str
) -> None:
    [finding] = load(small_spec(tmp_path), override).findings
    assert finding.code == "bad-value"
    assert expected in str(finding)
