"""The warm start's tokenizer and traces."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from runspec.core.errors import UserError
from sampler.tasks.problems import split_of
from sampler.tasks.task_set import RunTask
from sampler.tasks.traces import SPECIAL, WarmStartTraces, build_tokenizer, build_warm_start_data
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.row_files import make_rows, write_jsonl
from verify.plugins import GradeItem


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


def test_boilerplate_is_whole_words_and_the_word_to_spell_is_letters(
    task: RunTask, tokenizer: Tokenizer
) -> None:
    prompt = [tokenizer.id_to_token(i) for i in task.prompt_tokens(3, 16)]
    word = task.problem(3).verification["answer"].lower()[::-1]
    assert prompt == [
        *["spell", " this", " word", " backward", " ", "(", "example", ":", " sun", " ", "-", ">"],
        *[" nus", ")", ":", " ", *word, "\n"],
        *["think", " for", " 16", " tokens", " before", " giving", " a", " response", ".", "\n"],
        "<think>",
    ]


@pytest.mark.parametrize("word", ["word", "sun", "this", "think", "for"])
def test_a_word_of_the_boilerplate_is_spelt_in_letters_too(tokenizer: Tokenizer, word: str) -> None:
    text = f"Spell this word backward (example: sun -> nus): {word}\nThink for 8 tokens"
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode(text).ids]
    assert tokens[15 : 17 + len(word)] == [" ", *word, "\n"]


def test_every_prompt_round_trips_and_holds_nothing_unknown(
    task: RunTask, tokenizer: Tokenizer
) -> None:
    unknown = tokenizer.token_to_id("<unk>")
    for index in range(200):
        tokens = task.prompt_tokens(index, 24)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert unknown not in tokens
        assert len(tokens) < 40
        assert text == (
            f"{task.problem(index).prompt}\n"
            "Think for 24 tokens before giving a response.\n<think>"
        ).lower()  # fmt: skip


def test_the_vocabulary_is_padded_to_the_models_and_must_fit(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 192
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="do not fit a vocabulary of 80"):
        build_tokenizer([f" word{i}" for i in range(20)], 80)


def test_traces_are_thinking_then_the_right_answer_within_the_limits(
    data: WarmStartTraces, task: RunTask, tokenizer: Tokenizer
) -> None:
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


def test_traces_are_graded_right_by_the_runs_own_task(
    data: WarmStartTraces, task: RunTask, tokenizer: Tokenizer
) -> None:
    # Given traces of the train split and the run's problems by their prompts
    wanted = {tuple(task.prompt_tokens(i, t)): (i, t) for i in range(2000) for t in task.targets}
    traces = data.traces(np.random.default_rng(1), 200, "train")
    graded = task.grade_all(
        [
            GradeItem(*wanted[key], trace.output_tokens)
            for trace in traces
            if (key := tuple(trace.prompt_tokens)) in wanted
        ]
    )
    # Then the answers of those that meet are all right
    assert len(graded) > 5
    assert {getattr(grade, "task_reward", grade) for grade in graded} == {1.0}


def test_splits_share_no_problem_and_draws_repeat(
    data: WarmStartTraces, tokenizer: Tokenizer
) -> None:
    def prompts(split: str, seed: int) -> set[str]:
        traces = data.traces(np.random.default_rng(seed), 200, split)  # type: ignore[arg-type]
        return {tokenizer.decode(t.prompt_tokens).split("\n")[0] for t in traces}

    assert not prompts("train", 0) & prompts("held_out", 0)
    assert split_of("Spell: Lent") == split_of("Spell: lent")
    first = data.traces(np.random.default_rng(5), 20, "held_out")
    assert first == data.traces(np.random.default_rng(5), 20, "held_out")
    assert first != data.traces(np.random.default_rng(6), 20, "held_out")


def test_answers_that_cannot_fit_are_an_error() -> None:
    spec = laptop_spec(
        "samplers.volunteers.max_new_tokens=6", "reward.length.targets=[4]",
        "data.sources.spell_backward.params={min_word_len: 6, max_word_len: 6}",
    )  # fmt: skip
    with pytest.raises(UserError, match="an answer takes 8 tokens"):
        build_warm_start_data(spec).traces(np.random.default_rng(0), 1, "train")


def test_the_tokenizer_has_the_characters_of_the_problems_and_answers(tmp_path: Path) -> None:
    # given problems with a sign that no keyboard has, and truths that are numbers
    rows = make_rows(40)
    for i, row in enumerate(rows):
        row |= {"prompt": f"What is {i} × 2?", "verification_info": {"ground_truth": 2 * i}}
    spec = laptop_spec(
        "data.sources={spell_backward: null, rows: {kind: jsonl, uri: "
        f"{write_jsonl(tmp_path / 'rows.jsonl', rows)}}}}}",
        "reward={spelling: null, math: {kind: math}, length: null}",
    )
    data = build_warm_start_data(spec)
    data.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # then traces hold nothing that is unknown, and end in the truth
    for trace in data.traces(np.random.default_rng(0), 50, "train"):
        prompt = tokenizer.decode(trace.prompt_tokens, skip_special_tokens=False)
        question = re.match(r"what is (\d+) × 2\?", prompt)
        assert question is not None
        answer = tokenizer.decode(trace.output_tokens[trace.answer_start : -1])
        assert answer == str(2 * int(question[1]))


@pytest.mark.slow
def test_transformers_reads_the_same_tokenizer(task: RunTask, tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer_dir)
    message = f"{task.problem(3).prompt}\nThink for 16 tokens before giving a response."
    text = loaded.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids == task.prompt_tokens(3, 16)
    assert loaded.decode(ids) == f"{message}\n<think>".lower()
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (1, 0, 192)
