"""Data of a warm start: a small tokenizer, and supervised traces that think, then answer.

A trace thinks with drafts of the answer, cut to the requested length:
`ymed,ymed,ym</think>ymed<eos>`. All traces teach the form. Only a share of them teaches that the
length follows the prompt. Reinforcement learning teaches the rest of that, and to be right more
often.

The tokenizer is for a model that the run creates itself, and is written as Hugging Face files.
Words that every prompt has are one token each. Everything else is single characters, so the policy
must spell words letter by letter. All text is lower-cased (the scorers used here ignore case), so
the small model needs no second alphabet.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.models import made_tokenizer_files
from runspec.core.schema import RunSpec
from runspec.core.tokenizer_files import TokenizerFiles
from sampler.tasks.interfaces import make_term
from sampler.tasks.prompts import THINK_END, PromptCodec, unformatted
from sampler.tasks.task_set import InSplit, Problems, problem_filter, target_lengths
from verify.plugins import Problem, Split, Trace

PAD, EOS, UNKNOWN, THINK = "<pad>", "<eos>", "<unk>", "<think>"
SPECIAL = (PAD, EOS, UNKNOWN, THINK, THINK_END)
CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '\\n<think>' + message['content'] + '<eos>' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<think>' }}{% endif %}"
)
TOKENIZER_CONFIG = {
    "eos_token": EOS,
    "pad_token": PAD,
    "unk_token": UNKNOWN,
    "chat_template": CHAT_TEMPLATE,
}
"""Special tokens and chat template of tokenizer_config.json."""
_WORD = re.compile(r" ?(?:[a-z]+|[0-9]+)")
# The last word of a line is never one token: it is the subject of the problem, and the policy has
# to spell it even if every prompt has it.
_WORD_ENDS = r"(?![a-z0-9]|\s*(?:\n|$))"
_WORD_BEGINS = r"(?<![a-z0-9])"
_SAMPLED_PROBLEMS = 64
_SAMPLED_FOR_CHARACTERS = 1000
_SHORTEST = 4


def build_tokenizer(
    words: Sequence[str], vocab_size: int, characters: Sequence[str] = ()
) -> Tokenizer:
    """Build a tokenizer whose vocabulary is special tokens, characters, words and padding.

    Args:
        words: whole-word tokens, lower-case, a leading blank included where there is one.
        vocab_size: size of the model's vocabulary; unused ids are named <unused0>, <unused1>, ...
        characters: lower-case characters to add to `CHARACTERS`.

    Raises:
        UserError: the model's vocabulary is too small.
    """
    tokens = list(dict.fromkeys([*SPECIAL, *CHARACTERS, *characters, *words]))
    if len(tokens) > vocab_size:
        raise UserError(
            f"{len(tokens)} tokens do not fit a vocabulary of {vocab_size}",
            place="model.shape.vocab_size",
            remedy=f"make it at least {len(tokens)}",
        )
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    # An Oniguruma pattern that splits text into known words and single characters.
    whole = [
        ("" if word.startswith(" ") else _WORD_BEGINS) + re.escape(word) + _WORD_ENDS
        for word in sorted(words, key=lambda word: (-len(word), word))
    ]
    pieces = "(?m)" + "|".join([*whole, "."])  # (?m): the dot also matches a line break
    tokenizer = Tokenizer(
        WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


class WarmStartTraces:
    """Implements `verify.plugins.WarmStartData` for problems that come with an answer."""

    def __init__(self, spec: RunSpec, obey_share: float, tokenizer: Tokenizer) -> None:
        self._obey_share = obey_share
        self._targets = target_lengths(spec)
        self._longest = min(pool.max_new_tokens for pool in spec.samplers)
        self._tokenizer = tokenizer
        files = TokenizerFiles(tokenizer, TOKENIZER_CONFIG, "the warm start's tokenizer")
        self._codec = PromptCodec(files, spec.data)
        splits: tuple[Split, ...] = ("train", "held_out")
        self._problems = {
            split: Problems(spec, problem_filter(spec, self._codec, split)) for split in splits
        }
        self._environments = {
            reward.kind: term
            for reward in spec.reward
            if (term := make_term(reward)).role == "environment"
        }
        self._bridges = {
            kind: self._codec.bridge(environment.tools)
            for kind, environment in self._environments.items()
        }
        self.eos_token_id: int = self._codec.eos_token_id
        self.pad_token_id: int = self._codec.token(PAD)

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and what goes with it into an existing directory."""
        files = made_tokenizer_files(TOKENIZER_CONFIG)
        for name, text in {**files, "tokenizer.json": self._tokenizer.to_str(pretty=True)}.items():
            write_atomic(directory / name, text.encode())

    def traces(self, rng: np.random.Generator, count: int, split: Split) -> list[Trace]:
        """Return `count` traces of problems drawn with replacement."""
        return [self._trace(rng, self._problems[split]) for _ in range(count)]

    def _trace(self, rng: np.random.Generator, problems: Problems) -> Trace:
        problem = problems.problem(int(rng.integers(len(problems))))
        target = int(rng.choice(self._targets)) if self._targets else None
        if problem.task_type in self._environments:
            return self._episode(rng, problem, target)
        codec, text = self._codec, _answer(problem)
        answer = codec.encode(text)
        if codec.token(UNKNOWN) in answer:
            raise UserError(
                f"the answer {text[:80]!r} has characters that the tokenizer lacks",
                place=f"problem {problem.problem_id}",
                remedy=f"write it with characters that the first {_SAMPLED_FOR_CHARACTERS} "
                "problems have, or leave the row out",
            )
        length = self._length(rng, target, shortest=len(answer) + 2)
        thinking = length - len(answer) - 2
        draft = [*answer, *codec.encode(",")]
        drafts = (draft * (thinking // len(draft) + 1))[:thinking]
        output = [*drafts, codec.token(THINK_END), *answer, codec.token(EOS)]
        return Trace(
            prompt_tokens=codec.prompt_tokens(problem.prompt, target),
            output_tokens=output,
            answer_start=thinking + 1,
        )

    def _episode(self, rng: np.random.Generator, problem: Problem, target: int | None) -> Trace:
        """Return the environment's own example as a trace of several turns, thinking nothing.

        For a share of the traces without `obey_share` the policy answers at once, without a tool.

        Raises:
            UserError: the environment has no example for the problem.
        """
        codec, environment = self._codec, self._environments[problem.task_type]
        said = environment.example(problem)
        if not said:
            raise UserError(
                f"kind {problem.task_type} has no example for problem {problem.problem_id}",
                place="warm_start",
                remedy="define `example` of the environment, or start from a model with weights",
            )
        if rng.random() >= self._obey_share:
            said = said[-1:]
        state, opening = environment.start(problem, 0)
        *before, last = opening
        output: list[int] = []
        own: list[bool] = []
        for number, text in enumerate(said):
            turn = [codec.token(THINK_END), *codec.encode(text), codec.token(EOS)]
            output, own = output + turn, own + [True] * len(turn)
            state, observations, over = environment.step(problem, state, text)
            if number + 1 < len(said):
                if over:
                    raise UserError(
                        f"the example for problem {problem.problem_id} goes on after its end",
                        place="warm_start",
                        remedy=f"mend `example` of kind {problem.task_type}",
                    )
                most = environment.max_observation_tokens
                bridge = self._bridges[problem.task_type]
                between = bridge.tokens(observations, ended=True, most=most)
                output, own = output + between, own + [False] * len(between)
        return Trace(
            prompt_tokens=codec.prompt_tokens(
                last["content"], target, before=before, tools=environment.tools
            ),
            output_tokens=output,
            answer_start=len(output) - len(turn) + 1,
            own=own,
        )

    def _length(self, rng: np.random.Generator, target: int | None, *, shortest: int) -> int:
        """Draw the number of output tokens; never fewer than the answer takes.

        It is the target for `obey_share` of the traces, else uniform from 4 to a quarter above the
        longest target.
        """
        if shortest > self._longest:
            raise UserError(
                f"an answer takes {shortest} tokens, more than max_new_tokens = {self._longest}",
                place="samplers",
                remedy="raise max_new_tokens, or choose problems with shorter answers",
            )
        most = min(self._longest, max(self._targets, default=self._longest) * 5 // 4)
        if target is not None and rng.random() < self._obey_share:
            length = target
        else:
            length = int(rng.integers(_SHORTEST, max(_SHORTEST, most) + 1))
        return max(shortest, min(length, self._longest))


def _answer(problem: Problem) -> str:
    """Return the answer of a problem: the generator's, or the first correct answer of a row."""
    known = problem.verification
    answer = known.get("answer", known.get("ground_truth"))
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        raise UserError(
            f"problem {problem.problem_id} has no answer to write into a trace",
            place="data.sources",
            remedy="warm up on sources whose verification has `answer` or `ground_truth`",
        )
    return answer


def build_warm_start_data(spec: RunSpec) -> WarmStartTraces:
    """Return the traces and the tokenizer that `spec.warm_start` trains on.

    Raises:
        UserError: the spec has no warm start, its tasks cannot be built, or the vocabulary is too
            small for their words.
    """
    if spec.warm_start is None or spec.model.shape is None:
        raise UserError(
            "the spec has no warm start",
            place="warm_start",
            remedy="give model.shape and warm_start, or a model with weights",
        )
    problems = Problems(spec, InSplit("train"))
    looked_at = [problems.problem(i) for i in range(min(_SAMPLED_FOR_CHARACTERS, len(problems)))]
    characters = {c for each in looked_at for c in f"{each.prompt}{_answer(each)}".lower()}
    sample = [each.prompt for each in looked_at[:_SAMPLED_PROBLEMS]]
    targets: list[int | None] = [*target_lengths(spec)] or [None]
    words = set[str]()
    for target in targets:  # the words and numbers that all prompts have, with the blank before
        texts = [unformatted(spec.data, text, target).lower() for text in sample]
        words |= set.intersection(*(set(_WORD.findall(text)) for text in texts))
    tokenizer = build_tokenizer(sorted(words), spec.model.shape.vocab_size, sorted(characters))
    return WarmStartTraces(spec, spec.warm_start.obey_share, tokenizer)
