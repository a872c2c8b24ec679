"""A run's task: the same everywhere, graded, its warm start, and its check beforehand."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS
from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.core.schema import Evaluation, RunSpec, SolveRate
from runspec.core.schema.load import SpecFiles, dump_resolved
from runspec.core.schema.source_files import (
    compare_data_digests,
    data_digest,
    missing_plugins,
    source_files,
)
from runspec.lint.check import check_spec
from sampler.tasks import file_source
from sampler.tasks.check import check
from sampler.tasks.gym import REFUSED
from sampler.tasks.task_set import RunTask, build_evaluation_set, build_task_set, split_of
from sampler.tasks.traces import SPECIAL, build_tokenizer, build_warm_start_data
from tests.sampler.tasks.conftest import SPECS, laptop_spec
from tests.sampler.tasks.grading.plugin import install
from tests.sampler.tasks.row_files import FORMS, Row, drawn, make_rows, source, write_jsonl
from verify.plugins import Graded, GradeItem, GraderFault

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


def output(tokenizer: Tokenizer, text: str, *, end: bool = True) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return [*ids, tokenizer.token_to_id("<eos>")] if end else ids


def grade(task: RunTask, problem: int, target: int | None, tokens: list[int]) -> Graded:
    (graded,) = task.grade_all([GradeItem(problem, target, tokens)])
    if isinstance(graded, GraderFault):
        raise graded
    return graded


def answer_of(task: RunTask, index: int) -> str:
    return str(task.problem(index).verification["answer"])


def test_a_right_answer_earns_the_task_reward_and_length_counts_every_token(task, tokenizer):
    right = answer_of(task, 5)
    # given an output of `ab`, </think>, the answer and the end token
    tokens = output(tokenizer, f"ab</think>{right}")
    assert len(tokens) == 2 + 1 + len(right) + 1
    # when it is graded against a target three tokens longer
    graded = grade(task, 5, len(tokens) + 3, tokens)
    # then R = T + P with P = -alpha 3
    assert graded.task_reward == 1.0
    assert graded.length_penalty == pytest.approx(-0.15)
    assert graded.reward == pytest.approx(0.85)
    assert grade(task, 5, None, tokens).reward == 1.0


def test_whatever_is_not_the_whole_answer_earns_nothing(task, tokenizer):
    right = answer_of(task, 5)
    wrong = {
        "partly right": output(tokenizer, f"a</think>{right[:-1]}q"),
        "too long": output(tokenizer, f"a</think>{right}x"),
        "too short": output(tokenizer, f"a</think>{right[:-1]}"),
        "empty": output(tokenizer, "a</think>"),
        "no </think>": output(tokenizer, right),
        "a second </think>": output(tokenizer, f"a</think>x</think>{right}"),
        "cut off": output(tokenizer, f"a</think>{right}", end=False),
        "an end inside": [*output(tokenizer, f"a</think>{right}"), *output(tokenizer, "b")],
        "nothing": [],
        "only the end": output(tokenizer, ""),
        "tokens that do not exist": [10**6, -1, *output(tokenizer, f"</think>{right}")],
    }
    rewards = {name: grade(task, 5, 8, tokens).task_reward for name, tokens in wrong.items()}
    assert rewards == dict.fromkeys(wrong, 0.0)
    # The length term does not depend on being right.
    assert grade(task, 5, 8, wrong["empty"]).length_penalty == pytest.approx(-0.05 * (8 - 3))


def test_a_grade_in_which_time_has_a_say_is_marked(task, tmp_path, tokenizer, tokenizer_dir):
    # given a problem of mathematics beside the generator's
    [row] = make_rows(1)
    row["verification_info"] = {"ground_truth": "x"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    spec = laptop_spec(
        f"data.sources={{spell_backward: null, rows: {{kind: jsonl, uri: {path}}}}}",
        "reward={spelling: null, math: {kind: math, timeout: 10m}}",
    )
    with closing(build_task_set(spec, tokenizer_dir)) as mixed:
        # then its grade says that it may differ elsewhere; the generator's may not
        assert grade(mixed, 0, None, output(tokenizer, "</think>x")).task_reward == 1.0
        assert not grade(mixed, 0, None, output(tokenizer, "</think>y")).repeatable
    assert grade(task, 5, None, output(tokenizer, "</think>x")).repeatable


def test_a_long_answer_that_only_begins_right_gets_no_credit(tokenizer, tokenizer_dir):
    # The generator's scorer adds 1/9 nine times and reaches 1.0000000000000002.
    params = "data.sources.spell_backward.params={min_word_len: 9, max_word_len: 9}"
    task = build_task_set(laptop_spec(params), tokenizer_dir)
    right = answer_of(task, 0)
    assert grade(task, 0, None, output(tokenizer, f"</think>{right}")).task_reward == 1.0
    assert grade(task, 0, None, output(tokenizer, f"</think>{right}s")).task_reward == 0.0


def test_problems_follow_the_seed_and_stay_out_of_the_held_out_split(task, tokenizer_dir):
    words = [task.problem(i).prompt for i in range(300)]
    other = build_task_set(laptop_spec("seed=43"), tokenizer_dir)
    again = build_task_set(laptop_spec(), tokenizer_dir)
    assert [again.problem(i).prompt for i in reversed(range(300))] == words[::-1]
    assert sum(other.problem(i).prompt == words[i] for i in range(300)) < 10
    assert {split_of(word) for word in words} == {"train"}
    assert len(task) == 20000
    with pytest.raises(IndexError):
        task.problem(20000)


def test_over_long_prompts_are_left_out_unless_all_are(tokenizer, tokenizer_dir):
    tight = build_task_set(laptop_spec("data.max_prompt_tokens=32"), tokenizer_dir)
    lengths = [len(tight.prompt_tokens(i, t)) for i in range(100) for t in tight.targets]
    assert max(lengths) == 32
    # What took the place of an over-long one is shown and graded as one problem
    for index in range(40):
        shown = tight.problem(index).prompt.removesuffix("\n").split()[-1]
        right = output(tokenizer, f"</think>{answer_of(tight, index)}")
        assert answer_of(tight, index).lower() == shown.lower()[::-1]
        assert grade(tight, index, 8, right).task_reward == 1.0
    hopeless = build_task_set(laptop_spec("data.max_prompt_tokens=10"), tokenizer_dir)
    with pytest.raises(UserError, match="none of 1000 problems fits"):
        hopeless.problem(0)


def test_sources_stand_behind_each_other_but_for_one_that_is_only_asked(tokenizer_dir):
    kind = "kind: reasoning_gym, dataset: spell_backward"
    more = f"{{{kind}, size: 5, params: {{min_word_len: 3, max_word_len: 3}}}}"
    longer = f"{{{kind}, size: 30, train: false, params: {{min_word_len: 7, max_word_len: 7}}}}"
    spec = laptop_spec(
        f"data.sources={{spell_backward: {{size: 50}}, more: {more}, longer: {longer}}}"
    )
    with closing(build_task_set(spec, tokenizer_dir)) as task:
        assert len(task) == 55
        assert task.problem(49).problem_id == "spell_backward-49"
        assert task.problem(54).problem_id == "more-4"
        assert len(answer_of(task, 54)) == 3
    evaluation = evaluated("longer", grader="spelling")
    with closing(build_evaluation_set(spec, evaluation, tokenizer_dir)) as asked:
        assert len(asked) == 30
        assert {asked.problem(i).task_type for i in range(30)} == {"reasoning_gym"}


def evaluated(source: str, **fields: object) -> Evaluation:
    return Evaluation.model_validate({"name": "e", "source": source, **fields})


def test_an_evaluation_asks_what_the_run_does_not_train_on(tokenizer_dir):
    spec = laptop_spec("data.sources.spell_backward.size=300", "evaluations=null")
    # given a run that holds nothing out by itself, and an evaluation of the source it trains on
    evaluation = evaluated("spell_backward")
    cold = spec.model_copy(update={"warm_start": None})
    asking = cold.model_copy(update={"evaluations": [evaluation]})

    def prompts(task: RunTask) -> set[str]:
        with closing(task):
            return {task.problem(index).prompt.lower() for index in range(len(task))}

    trained = prompts(build_task_set(asking, tokenizer_dir))
    asked = prompts(build_evaluation_set(asking, evaluation, tokenizer_dir))
    # then no problem is both
    assert asked and trained and not asked & trained
    # and without the evaluation it would have trained on some of them
    assert asked & prompts(build_task_set(cold, tokenizer_dir))


EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}


def evaluates_the_answer(scorer: object) -> bool:
    """Whether a scorer calls an evaluator on its argument `answer`."""
    calls = (
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(scorer))))
        if isinstance(node, ast.Call) and node.args
    )
    return any(
        ast.unparse(call.func).rpartition(".")[2] in EVALUATORS
        and ast.unparse(call.args[0]) == "answer"
        for call in calls
    )


def test_every_scorer_that_evaluates_answers_is_on_the_list():
    found = {
        name for name, (kind, _) in DATASETS.items() if evaluates_the_answer(kind.score_answer)
    }
    assert found | {"composite"} == REFUSED


BACKWARD = "data.sources.spell_backward"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.spelling.kind=oracle"], "no plug-in offers kind 'oracle'; installed: code, math"),
        ([f"{BACKWARD}.kind=oracle"], "no plug-in offers kind 'oracle'; installed: "),
        (["reward.spelling="], "have no reward term of that kind"),
        ([f"{BACKWARD}.dataset=nothing"], "refuses 'nothing'"),
        ([f"{BACKWARD}.params.min_word_len=0"], "min_word_len must be positive"),
        ([f"{BACKWARD}.params={{colour: red}}"], "unexpected keyword argument"),
        *(
            ([f"{BACKWARD}.dataset={name}", f"{BACKWARD}.params={{}}"], f"{name}' evaluates")
            for name in sorted(REFUSED)
        ),
    ],
)
def test_a_task_that_cannot_be_built_says_what_is_missing(tokenizer_dir, overrides, message):
    path = SPECS / "target_short.yaml"
    loaded = check_spec(SpecFiles(path, profile="laptop", overrides=overrides))
    assert loaded.spec is not None
    with pytest.raises(UserError, match=message):
        build_task_set(loaded.spec, tokenizer_dir)


def test_missing_plugins_are_known_without_importing_any():
    spec = laptop_spec("reward.code={kind: chess}", "data.sources.rows={kind: csv, uri: x}")
    assert missing_plugins(laptop_spec()) == []
    assert {plugin.path: str(plugin) for plugin in missing_plugins(spec)} == {
        "data.sources.rows": "no installed package offers the kind 'csv' in runspec.sources",
        "reward.code": "no installed package offers the kind 'chess' in runspec.rewards",
    }


# -- The same in every process: problems follow from the spec, the files and the tokenizer alone ---

COPIED = ["one_jsonl", "shards_of_parquet", "saved_dataset_dict"]
ELSEWHERE = "from tests.sampler.tasks.row_files import main; main()"


def with_source(spec, one):
    return spec.model_copy(update={"data": spec.data.model_copy(update={"sources": [one]})})


def spec_of_form(form: str, folder: Path) -> RunSpec:
    """The laptop's spec with one source: rows in a form, GSM8K's, or a generator."""
    spec = laptop_spec("data.max_prompt_tokens=60")
    rows = [
        row | {"prompt": f"add {i} and {'x' * (i % 40)}", "task_type": "reasoning_gym"}
        for i, row in enumerate(make_rows(300))
    ]
    if form == "reasoning_gym":
        return spec
    if form == "gsm8k":
        asked = [{"question": r["prompt"], "answer": f"#### {i}"} for i, r in enumerate(rows)]
        path = write_jsonl(folder / "gsm8k.jsonl", asked)
        return with_source(spec, source("gsm8k", path, task_types={"math": "reasoning_gym"}))
    bounds = SolveRate(field="rate", min=0.1, max=0.9)
    return with_source(spec, FORMS[form](folder, rows).model_copy(update={"solve_rate": bounds}))


def test_processes_draw_the_same_prompts_from_the_same_leases(tokenizer_dir, tmp_path, monkeypatch):
    # given a spec of each form with its files, drawn from here
    forms = [*FORMS, "gsm8k", "reasoning_gym"]
    specs = {form: spec_of_form(form, tmp_path / form) for form in forms}
    here = {form: drawn(specs[form], tokenizer_dir, None) for form in forms}
    # when a process that shares nothing with this one draws, in another order, and of some forms
    # from copies of the files under their names, with the uri of another machine
    asked = []
    for form, spec in reversed(specs.items()):
        copies = None
        if form in COPIED:
            copies = tmp_path / "copies" / form
            [one] = spec.data.sources
            for name, path in source_files(one).items():
                (copies / one.name / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copies / one.name / name)
            spec = with_source(spec, one.model_copy(update={"uri": "hf://not/here"}))
        (tmp_path / f"{form}.json").write_bytes(dump_resolved(spec))
        asked.append((str(tmp_path / f"{form}.json"), str(tokenizer_dir), copies and str(copies)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    command, given = [sys.executable, "-c", ELSEWHERE], json.dumps(asked).encode()
    done = subprocess.run(command, input=given, capture_output=True, check=True)
    there = dict(zip(reversed(forms), json.loads(done.stdout), strict=True))
    # then leases mean the same prompts, and some rows were left out by both
    assert there == here
    for form, (digest, count, prompts) in here.items():
        assert digest == data_digest(specs[form])
        assert len(prompts) == 32
        assert form == "reasoning_gym" or 50 < count < 290


def test_other_data_is_noticed_by_its_digest(tmp_path, monkeypatch):
    rows, spec = make_rows(5), laptop_spec()
    one = source("jsonl", write_jsonl(tmp_path / "rows.jsonl", rows))
    with_rows = with_source(spec, one)
    before = data_digest(with_rows)
    assert data_digest(spec) != before
    # The same contents elsewhere: the same digest
    elsewhere = write_jsonl(tmp_path / "copies" / "rows" / "rows.jsonl", rows)
    assert data_digest(with_rows, tmp_path / "copies") == before
    compare_data_digests(before, before, whose="worker ab")
    # One digit of one row: another, and both sides are named
    rows[3]["verification_info"] = '{"ground_truth": "7"}'
    write_jsonl(elsewhere, rows)
    after = data_digest(with_rows, tmp_path / "copies")
    assert after != before
    with pytest.raises(UserError, match=f"of worker ab are made from other data .{after[:12]}"):
        compare_data_digests(before, after, whose="worker ab")
    # and so is another version of a generator
    generated = data_digest(spec)
    monkeypatch.setattr("runspec.core.schema.source_files.version", lambda name: "0.0.1")
    assert data_digest(spec) != generated


# -- The warm start: its tokenizer and its traces --------------------------------------------------


def test_boilerplate_is_whole_words_and_the_word_to_spell_is_letters(task, tokenizer):
    prompt = [tokenizer.id_to_token(i) for i in task.prompt_tokens(3, 16)]
    word = task.problem(3).verification["answer"].lower()[::-1]
    assert prompt == [
        *["spell", " this", " word", " backward", " ", "(", "example", ":", " sun", " ", "-", ">"],
        *[" nus", ")", ":", " ", *word, "\n"],
        *["think", " for", " 16", " tokens", " before", " giving", " a", " response", ".", "\n"],
        "<think>",
    ]
    for word in ("word", "sun", "this", "think", "for"):  # of the boilerplate, as words to spell
        text = f"Spell this word backward (example: sun -> nus): {word}\nThink for 8 tokens"
        tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode(text).ids]
        assert tokens[15 : 17 + len(word)] == [" ", *word, "\n"]


def test_the_vocabulary_is_padded_to_the_models_and_must_fit(tokenizer):
    assert tokenizer.get_vocab_size() == 192
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="do not fit a vocabulary of 80"):
        build_tokenizer([f" word{i}" for i in range(20)], 80)


def test_traces_are_thinking_then_the_right_answer_within_the_limits(data, task, tokenizer):
    traces = data.traces(np.random.default_rng(0), 300, "train")
    think_end, eos = tokenizer.token_to_id("</think>"), data.eos_token_id
    obeyed = 0
    for trace in traces:
        prompt = tokenizer.decode(trace.prompt_tokens, skip_special_tokens=False)
        word = prompt.split("): ")[1].split("\n")[0]
        target = int(prompt.split("think for ")[1].split(" ")[0])
        thinking = trace.output_tokens[: trace.answer_start - 1]
        assert trace.output_tokens[trace.answer_start - 1] == think_end
        assert tokenizer.decode(trace.output_tokens[trace.answer_start :]) == word[::-1]
        assert trace.output_tokens[-1] == eos
        assert think_end not in thinking
        drafts = f"{word[::-1]}," * 20
        assert tokenizer.decode(thinking) == drafts[: len(thinking)]
        assert len(word) + 2 <= len(trace.output_tokens) <= 40
        obeyed += len(trace.output_tokens) == target
    # 30 % on purpose, about 1/37 of the rest by chance; 4 standard deviations are 0.11.
    assert 0.21 < obeyed / len(traces) < 0.43
    # and the run's own task grades those right whose prompts it has
    wanted = {tuple(task.prompt_tokens(i, t)): (i, t) for i in range(1000) for t in task.targets}
    met = [(wanted.get(tuple(trace.prompt_tokens)), trace.output_tokens) for trace in traces]
    graded = task.grade_all([GradeItem(*asked, tokens) for asked, tokens in met if asked])
    assert len(graded) > 3
    assert {getattr(grade, "task_reward", grade) for grade in graded} == {1.0}


def test_splits_share_no_problem_and_draws_repeat(data, tokenizer):
    def prompts(split: str, seed: int) -> set[str]:
        traces = data.traces(np.random.default_rng(seed), 200, split)  # type: ignore[arg-type]
        return {tokenizer.decode(t.prompt_tokens).split("\n")[0] for t in traces}

    assert not prompts("train", 0) & prompts("held_out", 0)
    assert split_of("Spell: Lent") == split_of("Spell: lent")
    first = data.traces(np.random.default_rng(5), 20, "held_out")
    assert first == data.traces(np.random.default_rng(5), 20, "held_out")
    assert first != data.traces(np.random.default_rng(6), 20, "held_out")


def test_answers_that_cannot_fit_are_an_error():
    spec = laptop_spec(
        *("samplers.volunteers.max_new_tokens=6", "reward.length.targets=[4]"),
        "data.sources.spell_backward.params={min_word_len: 6, max_word_len: 6}",
    )
    with pytest.raises(UserError, match="an answer takes 8 tokens"):
        build_warm_start_data(spec).traces(np.random.default_rng(0), 1, "train")


def test_the_tokenizer_has_the_characters_of_the_problems_and_answers(tmp_path):
    # given problems with a sign that no keyboard has, and truths that are numbers
    rows = [
        row | {"prompt": f"What is {i} × 2?", "verification_info": {"ground_truth": 2 * i}}
        for i, row in enumerate(make_rows(40))
    ]
    data = build_warm_start_data(spec_of(tmp_path, rows, "reward.length=null"))
    data.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # then traces hold nothing that is unknown, and end in the truth
    for trace in data.traces(np.random.default_rng(0), 50, "train"):
        prompt = tokenizer.decode(trace.prompt_tokens, skip_special_tokens=False)
        question = re.match(r"what is (\d+) × 2\?", prompt)
        assert question is not None
        answer = tokenizer.decode(trace.output_tokens[trace.answer_start : -1])
        assert answer == str(2 * int(question[1]))


# -- `python -m sampler check`: what it finds before a role starts ---------------------------------


def spec_of(folder: Path, rows: list[Row], *overrides: str) -> RunSpec:
    """The laptop's run with problems of rows, graded by a reward `mine`."""
    path = write_jsonl(folder / "rows.jsonl", rows)
    return laptop_spec(
        f"data.sources={{spell_backward: null, words: {{kind: jsonl, uri: {path}}}}}",
        "reward={spelling: null, mine: {kind: math, timeout: 10m}}",
        *overrides,
    )


def found(spec: RunSpec) -> list[tuple[str, str]]:
    return [(fault.place, fault.thing) for fault in check(spec, None).faults]


def test_problems_that_are_right_are_counted_and_cached_for_the_roles(tmp_path):
    rows = make_rows(100)
    rows[5]["prompt"] = "why " * 100
    spec = spec_of(tmp_path, rows)
    checked = check(spec, None)
    # then they are counted, the over-long one too
    assert checked.faults == []
    assert checked.notes == ["source words: 88 to train on, 11 held out, 1 over-long"]
    # and the roles need not look through the rows again
    with patch.object(file_source, "_scan", side_effect=AssertionError):
        build_warm_start_data(spec).write_tokenizer(tmp_path)
        assert len(build_task_set(spec, tmp_path)) == 88


def test_prompts_are_measured_with_the_tokenizer_of_a_model_that_is_here(tmp_path, tokenizer_dir):
    rows = make_rows(20)
    rows[5]["prompt"] = "why " * 100
    model = f"model={{hf: {tokenizer_dir}, shape: null}}"
    held_none_out = ("warm_start=null", "evaluations=null")
    spec = spec_of(tmp_path, rows, model, *held_none_out)
    counts = "source words: 19 to train on, 0 held out, 1 over-long"
    assert check(spec, tokenizer_dir).notes == [counts]
    with patch.object(file_source, "_scan", side_effect=AssertionError):
        assert len(build_task_set(spec, tokenizer_dir)) == 19
    # and without it the rows are read all the same
    del rows[5]["task_type"]
    spec = spec_of(tmp_path, rows, model, *held_none_out)
    assert [thing[:13] for _, thing in found(spec)] == ["rows.jsonl:6:"]


@pytest.mark.parametrize(
    ("change", "overrides", "said"),
    [
        ({"task_type": None}, [], "rows.jsonl:5: task_type is None, not a text"),
        ({"verification_info": "{"}, [], "rows.jsonl:5: verification_info is no"),
        (
            {"task_type": "maths"},
            [],
            "task_type 'maths' has no reward: 1 of 50 problems; rewards grade math",
        ),
        ({}, ["data.max_prompt_tokens=4"], r"no problem is left.*\(data.max_prompt_tokens is 4\)$"),
    ],
)
def test_rows_that_no_role_could_use_are_named(tmp_path, change, overrides, said):
    rows = make_rows(50)
    rows[4] |= change
    ((place, thing),) = found(spec_of(tmp_path, rows, *overrides))
    assert place == "data.sources.words"
    assert re.match(said, thing)


@pytest.mark.parametrize("truth", [None, "", " ", {"a": 1}, [], [None]])
def test_every_row_that_its_reward_cannot_grade_is_named(tmp_path, truth):
    rows = make_rows(50)
    for row in rows[4:6]:
        row["verification_info"] = {"ground_truth": truth}
    named = "rows.jsonl:5: verification_info.ground_truth .*; rows.jsonl:6: verification_info"
    place, thing = found(spec_of(tmp_path, rows))[-1]  # the warm start may miss the answer, too
    assert place == "data.sources.words"
    assert re.match(f"2 of 50 problems cannot be graded: {named}", thing)


SOURCE = """\
class Rows:
    task_types = frozenset({"math"})

    def __init__(self, source, seed, keep):
        self.size = source.size

    def __len__(self):
        return self.size

    def problem(self, index):
        raise KeyError("question")
"""
MISSING = "ModuleNotFoundError: No module named 'no_such_module' at {}:1"


@pytest.mark.parametrize(
    ("source", "said"),
    [("import no_such_module\n", MISSING), (SOURCE, "KeyError: 'question' at {}:11")],
)
def test_a_plugin_that_raises_is_named_with_its_line(tmp_path, monkeypatch, source, said):
    module = f"odd_{len(source)}"
    install(tmp_path, monkeypatch, module, f"[runspec.sources]\nodd = {module}:Rows\n", source)
    spec = laptop_spec("data.sources={spell_backward: null, words: {kind: odd, size: 3}}")
    ((place, thing),) = found(spec)
    assert place == "data.sources.words"
    assert thing == f"the plug-in of kind odd: {said.format(f'{tmp_path.name}/{module}.py')}"
