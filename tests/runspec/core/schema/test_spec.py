"""How layers, placements and overrides become one spec, and every finding about them."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.schema import Islands, RunSpec
from runspec.core.schema.load import SpecFiles, dump_resolved, parse_resolved
from runspec.core.schema.role_names import island_names, island_spec, step_overlap
from runspec.lint.check import CheckedSpec, check_spec
from tests.runspec.core.schema.spec_files import BASE, DOCUMENTS, lines, load, small_spec, write

HEAD = "version: runspec/v1\nkind: Placement\nname: here\n"
EXTENDS = "1:11: error extends: extends: "


def at(spec: Any, path: str) -> Any:
    """The value at a path; of a list of named blocks, their names."""
    for key in path.split("."):
        is_list = isinstance(spec, list)
        spec = next(e for e in spec if e.name == key) if is_list else getattr(spec, key)
    named = isinstance(spec, list) and hasattr(spec[0], "name")
    return [each.name for each in spec] if named else spec


MORE = "{name: more, hardware: {kind: cpu}, max_model_len: 90, max_new_tokens: 40}"
POOLS = {"samplers": ["pool", "more"], "samplers.pool.replicas": 2, "samplers.more.replicas": 1}
TERMS = "{spelling: null, graded: {kind: reasoning_gym}, length: {alpha: 0.2}}"


@pytest.mark.parametrize(
    ("overlay", "overrides", "expected"),
    [
        # maps merge, and plain lists are replaced
        ("algorithm: {kl: {coef: 0.5}}", [], {"algorithm.kl.coef": 0.5, "algorithm.group_size": 4}),
        ("optimizer: {betas: [0.8, 0.9]}", [], {"optimizer.betas": (0.8, 0.9)}),
        ("reward: [{name: length, targets: [4]}]", [], {"reward.length.targets": [4]}),
        # lists of named objects merge by name
        (f"samplers: [{MORE}, {{name: pool, replicas: 2}}]", [], POOLS),
        # a named list may be a map, where null deletes
        (f"reward: {TERMS}", [], {"reward": ["length", "graded"], "reward.length.alpha": 0.2}),
        ("broadcast: {relays: {a: {}, b: {upstream: [a]}}}", [], {"broadcast.relays": ["a", "b"]}),
        # null deletes, and the default comes back; where a key can be null, it is a value
        ("algorithm: {group_size: null, updates_per_step: 1}", [], {"algorithm.group_size": 16}),
        ("algorithm: {clip: {delta: null}}", [], {"algorithm.clip.delta": None}),
        ("algorithm: {clip: {delta: null}}", ["algorithm.clip="], {"algorithm.clip.delta": 4.0}),
        ("", ["algorithm.clip.delta=", "algorithm.clip.delta=6"], {"algorithm.clip.delta": 6.0}),
        # --set takes YAML values and addresses named objects
        ("", ["optimizer.lr=1e-6"], {"optimizer.lr": 1e-6}),
        ("", ["algorithm.clip={delta: 5}"], {"algorithm.clip.delta": 5.0}),
        ("", ["reward.length.alpha=0.25"], {"reward.length.alpha": 0.25}),
        ("", ["verify.lease_timeout=90s"], {"verify.lease_timeout": 90.0}),
        # variables fill values, whole or in part
        ("steps: ${STEPS}", [], {"steps": 7}),
        ("model: {hf: 'models/${WHO:?whose}/small'}", [], {"model.hf": "models/ours/small"}),
        ("data: {length_prompt: '${STEPS} {target}'}", [], {"data.length_prompt": "7 {target}"}),
    ],
)
def test_layers_merge(tmp_path, overlay, overrides, expected):
    spec = load(small_spec(tmp_path, overlay), *overrides, STEPS="7", WHO="ours").require()
    assert {key: at(spec, key) for key in expected} == expected


def test_extends_comes_first_then_the_profile_then_set(tmp_path):
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


def test_every_finding_is_reported_in_one_pass_at_its_exact_place(tmp_path):
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
    wanted = [
        "--set:1:21: error bad-value: samplers.pool.dtype: *, got 'float3' (did you mean float32?)",
        "spec.yaml:10:22: error wrong-type: data.max_prompt_tokens: *, got inf (*)",
        "spec.yaml:11:39: error wrong-type: data.sources.words.params.a: a single value was *",
        "spec.yaml:12:17: error missing-key: optimizer.lr: *, deleted by this null (*",
        "spec.yaml:12:30: error missing-key: optimizer.betas.1: a value is missing (*",
        "spec.yaml:13:25: error unit: verify.lease_timeout: *, got 60 (write the unit behind *",
        "spec.yaml:14:12: error unknown-name: samplers: no 'pol' to delete (did you mean pool?)",
        "spec.yaml:2:7: error bad-value: seed: *, got -1 (`runspec explain seed` says what is *",
        "spec.yaml:4:3: error unknown-key: algorithm.grop_size: *(did you mean group_size?)",
        "spec.yaml:5:15: error wrong-type: algorithm.group_size: *, got '8' (leave the quotes out)",
        "spec.yaml:6:7: error wrong-type: algorithm.kl: a map was expected, got 4 (*",
        "spec.yaml:7:26: error bad-value: algorithm.advantage.normalize: *(did you mean task?)",
        "spec.yaml:8:1: error unknown-key: group_size: *(did you mean algorithm.group_size?)",
    ]
    assert len(found) == len(wanted)
    for line, form in zip(sorted(found), wanted, strict=True):
        assert fnmatchcase(line, form.replace("[", "[[]")), line


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        # unknown keys, at every depth
        ("modle: {}", "unknown-key: modle: *(did you mean model?)"),
        ("broadcast: {relays: {eu: {urls: x}}}", "unknown-key: broadcast.relays.eu.urls: *url?)"),
        ("secrets: [{name: t, from: {envv: T}}]", "unknown-key: secrets.t.from.envv: *env?)"),
        ("verify: {xyz: 1}", "unknown-key: verify.xyz: *(known here: validators, hardware, *"),
        # values that no process could use
        ("verify: {lease_timeout: 0s}", "bad-value: verify.lease_timeout: a duration above zero*"),
        ("secrets: [{name: A=B, from: {env: T}}]", "bad-value: secrets.A=B.name: string should *"),
        # variables that cannot be filled
        ("steps: ${NO}", "variable: steps: variable NO is not set*"),
        ("name: ${EMPTY:?a name}", "variable: name: variable EMPTY is empty: a name*"),
        ("name: a${V", "variable: name: a variable is written ${NAME} or*"),
        ("steps: ${LONG}", "variable: steps: a number of 80 characters*"),
        ("steps: ${LIST}", "wrong-type: steps: a whole number was expected*"),
    ],
)
def test_a_finding_names_key_and_remedy(tmp_path, overlay, said):
    environ = {"EMPTY": "", "LONG": "9" * 80, "LIST": "[1]"}
    found = lines(load(small_spec(tmp_path, overlay), **environ), tmp_path)
    # what else a secret lacks is found too
    [line] = [each for each in found if "missing-key: secrets" not in each]
    place = f"spec.yaml:2:{overlay.index(':') + 3}:" if "${" in overlay else "*"
    assert fnmatchcase(line, f"{place} error {said}"), line


def test_a_misspelt_key_is_found_even_where_null_or_a_later_layer_hides_it(tmp_path):
    write(tmp_path / "profiles/p.yaml", "optimzer: null")
    loaded = load(small_spec(tmp_path, "optimzer: {lr: 1}"), profile="p")
    places = [line.split(": ")[0] for line in lines(loaded, tmp_path)]
    assert places == ["spec.yaml:2:1", "profiles/p.yaml:1:1"]
    # and whoever requires the spec is told every error with its place
    with pytest.raises(UserError, match=r"2 errors(.|\n)*spec.yaml:2:1(.|\n)*p.yaml:1:1"):
        loaded.require()


def test_a_secret_never_becomes_a_value(tmp_path):
    overlay = 'secrets: [{name: t, from: {env: TOKEN}}]\nmodel: {hf: "https://${TOKEN}@host/m"}'
    [finding] = load(small_spec(tmp_path, overlay), TOKEN="hunter2").findings
    assert (finding.code, finding.line, finding.column) == ("secret-value", 3, 13)
    assert "hunter2" not in str(finding)


@pytest.mark.parametrize(
    ("extends", "expected"),
    [
        ("[gone.yaml]", f"{EXTENDS}no file"),
        (f"[{'a' * 300}.yaml]", f"{EXTENDS}cannot read"),
        ("[/etc/passwd]", f"{EXTENDS}'/etc/passwd' is no .yaml file"),
        ("[secret.yaml]", f"{EXTENDS}'secret.yaml' is no .yaml file"),
        ("base.yaml", "1:10: error extends: extends: a list of files was expected"),
        ("[[base.yaml]]", f"{EXTENDS}a file name was expected"),
        ("[base.yaml, spec.yaml]", "1:22: error extends: extends: a cycle: spec.yaml -> spec.yaml"),
    ],
)
def test_bad_extends_are_named_at_the_file_name(tmp_path, extends, expected):
    path = small_spec(tmp_path)
    write(tmp_path / "credentials", "password: hunter2 : x")
    (tmp_path / "secret.yaml").symlink_to("credentials")
    path.write_text(f"extends: {extends}\n")
    loaded = load(path)
    [line] = lines(loaded, tmp_path)
    assert loaded.spec is None
    assert line.startswith(f"spec.yaml:{expected}")


def test_a_cycle_over_two_files_and_a_fan_of_files_both_end(tmp_path):
    write(tmp_path / "a.yaml", "extends: [b.yaml]")
    write(tmp_path / "b.yaml", "extends: [a.yaml]")
    assert "a.yaml -> b.yaml -> a.yaml" in load(tmp_path / "a.yaml").findings[0].message

    for i in range(8):
        write(tmp_path / f"f{i}.yaml", f"extends: [{', '.join([f'f{i + 1}.yaml'] * 5)}]")
    write(tmp_path / "f8.yaml", "steps: 1")
    assert "more than 32 files" in load(tmp_path / "f0.yaml").findings[0].message


def test_bad_usage_is_said_with_its_remedy(tmp_path):
    path = small_spec(tmp_path)
    for override, remedy in (
        *((wrong, "path=value") for wrong in ("steps", "=3", "a..b=3")),
        ("a b=1", "no path"),
    ):
        with pytest.raises(UserError, match=remedy):
            load(path, override)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    for name, message in (
        *(("gone.yaml", "no file"), (".", "no regular file")),
        *(("a" * 300, "cannot read"), ("latin.yaml", "not UTF-8")),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)
    with pytest.raises(UserError, match=f"'fast' in {tmp_path}/profiles; there are: none"):
        load(path, profile="fast")
    write(tmp_path / "profiles/fast.yaml", "steps: 1")
    write(tmp_path / "profiles/node.yaml", "steps: 1")
    for name, message in (("slow", ""), ("../fast", ""), ("fats", ".*did you mean fast")):
        with pytest.raises(UserError) as caught:
            load(path, profile=name)
        said = f"{caught.value} {caught.value.remedy}"
        assert re.search(f"there are: fast, node{message}", said, re.DOTALL), said


def placed(folder: Path, text: str, *overrides: str, head: str = HEAD) -> CheckedSpec:
    """The small spec with a placement over it."""
    site = write(folder / "site.yaml", head + text)
    files = SpecFiles(small_spec(folder), placement=site, overrides=overrides)
    return check_spec(files, environ={})


def test_a_placement_goes_over_the_profile_and_under_set(tmp_path):
    write(tmp_path / "profiles/fast.yaml", "learner: {remat: none, attention: xla}")
    site = write(tmp_path / "site.yaml", HEAD + "learner: {remat: dots, hosts: 2}")
    files = SpecFiles(small_spec(tmp_path), "fast", site, ["learner.hosts=1"])
    spec = check_spec(files, environ={}).require()
    assert (spec.learner.remat, spec.learner.attention, spec.learner.hosts) == ("dots", "xla", 1)
    assert spec.name == "small", "the placement's own name is the site's"


def test_a_placement_sets_pools_relays_and_whole_blocks(tmp_path):
    text = """\
samplers: [{name: pool, replicas: 3, hardware: {kind: cpu, count: 2}}]
broadcast: {relays: {eu: {upstream: [origin]}}}
storage: {dir: /data}
secrets: {TOKEN: {from: {env: TOKEN}}}
budget: {max_hours: 2}
"""
    spec = placed(tmp_path, text).require()
    assert (spec.samplers[0].replicas, spec.samplers[0].hardware.count) == (3, 2)
    assert at(spec, "broadcast.relays") == ["eu"]
    assert spec.secrets[0].source.env == "TOKEN"
    assert (spec.storage.dir, spec.budget.max_hours) == ("/data", 2.0)


@pytest.mark.parametrize(
    ("text", "place", "path"),
    [
        ("steps: 5", "4:1", "steps"),
        ("samplers: {pool: {dtype: float32}}", "4:19", "samplers.pool.dtype"),
        ("samplers: [{name: pool, trust: trusted}]", "4:25", "samplers.pool.trust"),
        ("samplers: {pool: null}", "4:12", "samplers.pool"),
        ("samplers: []", "4:1", "samplers"),
        ("samplers: {more: {replicas: 1}}", "4:12", "samplers.more"),
        ("samplers: [{replicas: 1}]", "4:12", "samplers"),
        ("reward: {length: {alpha: 0.2}}", "4:19", "reward.length.alpha"),
        ("model: null", "4:1", "model"),
    ],
)
def test_what_is_the_recipes_is_refused_and_left_out(tmp_path, text, place, path):
    checked = placed(tmp_path, text)
    (finding,) = [f for f in checked.findings if f.severity == "error"]
    assert (finding.code, finding.path) == ("placement-scope", path)
    assert f"{finding.line}:{finding.column}" == place
    # then the spec is what the recipe says
    assert checked.spec == check_spec(SpecFiles(tmp_path / "spec.yaml"), environ={}).spec


@pytest.mark.parametrize(
    ("head", "text", "said"),
    [
        # a file that says of itself that it is a spec, with much that a placement may not say
        ("version: runspec/v1\nkind: Run\n", "steps: 5\n", "site.yaml:2:7: {}kind: a file of kind"),
        ("", "steps: 5\nseed: 3\n", "site.yaml:1:1: {}kind: a file of kind"),
        # files that it extends are held to the same
        (HEAD, "extends: [racks.yaml]\n", "racks.yaml:2:1: {}seed: "),
    ],
)
def test_a_spec_is_no_placement(tmp_path, head, text, said):
    write(tmp_path / "racks.yaml", "learner: {hosts: 2}\nseed: 4\n")
    (line,) = lines(placed(tmp_path, text, head=head), tmp_path)
    assert line.startswith(said.format("error placement-scope: "))


def test_by_itself_a_placements_keys_types_and_scope_are_checked(tmp_path):
    text = "learner: {hosts: many, mush: 1}\nsamplers: {anything: {replicas: 2}}\n"
    site = write(
        tmp_path / "site.yaml", f"{HEAD}{text}broadcast: {{relays: {{eu: null}}}}\nseed: 3"
    )
    checked = check_spec(SpecFiles(site), environ={})
    found = [finding.code for finding in checked.findings]
    assert (checked.spec, found) == (None, ["placement-scope", "unknown-key", "wrong-type"])


def spec_of(path: Path, *overrides: str) -> RunSpec:
    spec = load(path, *overrides).spec
    assert spec is not None
    return spec


def test_one_learner_has_no_islands_and_a_count_becomes_members():
    spec = spec_of(BASE)
    assert (island_names(spec), step_overlap(spec)) == ([], 0)
    assert island_spec(spec, "learner") is spec
    spec = spec_of(BASE, "learner.islands.count=3", "algorithm.prompts_per_step=10")
    assert island_names(spec) == ["0", "1", "2"]
    assert spec.learner.islands is not None and spec.learner.islands.count is None
    assert parse_resolved(dump_resolved(spec), place="spec.json") == spec
    # and an island's part of the groups is rounded up
    assert island_spec(spec, "2").grpo.prompts_per_step == 4


@pytest.mark.parametrize(
    ("islands", "code", "message"),
    [
        ("{members: []}", "bad-value", "exactly one of members and count"),
        ("{count: 2, members: [{name: a}]}", "bad-value", "exactly one of members and count"),
        ("{members: [{name: a}, {name: a}]}", "duplicate-name", "'a'"),
    ],
)
def test_islands_that_contradict_themselves_are_found(islands, code, message):
    [found] = load(BASE, f"learner.islands={islands}").findings
    assert (found.code, found.path.startswith("learner.islands")) == (code, True)
    assert message in found.message


def test_the_sparse_codec_goes_without_momentum():
    sparse = {"count": 2, "codec": {"kind": "sparse"}}
    own = {**sparse, "outer": {"momentum": 0.5}}
    for fields, momentum in (({"count": 2}, 0.9), (sparse, 0.0), (own, 0.5)):
        assert Islands.model_validate(fields).outer.momentum == momentum


def test_an_island_trains_its_part_of_documents_on_its_own_machine():
    own = "{name: b, hardware: {kind: cpu, count: 4}, mesh: {data: 4}, hosts: 2, rows: 2}"
    spec = spec_of(DOCUMENTS, f"learner.islands={{members: [{{name: a}}, {own}], overlap: 1}}")
    a, b = island_spec(spec, "a"), island_spec(spec, "b")
    assert a.learner == spec.learner.model_copy(update={"islands": None})
    assert (b.learner.mesh.devices, b.learner.hosts, b.learner.packing.rows) == (4, 2, 2)
    assert b.learner.packing.tokens == spec.learner.packing.tokens
    assert a.supervised and a.supervised.tokens_per_update == 512
    assert step_overlap(spec) == 1
    with pytest.raises(KeyError):
        island_spec(spec, "c")
