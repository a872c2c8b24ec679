"""Interfaces of the plug-ins that are loaded by name: task, prefill engine, warm start, files.

`verify` imports neither samplers nor learners. A package provides plug-ins as entry points:

    [project.entry-points."runspec.tasks"]
    default = "sampler.tasks.task_set:build_task_set"
    requirements = "sampler.tasks.launch:require_graders"

    [project.entry-points."runspec.prefill"]
    jax = "learner_jax.prefill:JaxPrefill"
    torch = "sampler.prefill:TorchPrefill"

    [project.entry-points."runspec.warm_start"]
    default = "sampler.tasks.traces:build_warm_start_data"

    [project.entry-points."runspec.data"]
    default = "bridge.model_files:fetch_data"

    [project.entry-points."runspec.replay"]
    default = "bridge.fetched_states:replay_link"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from runspec.core.address import JoinLink
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError
from runspec.core.process import Role, not_retried
from runspec.core.schema import RunSpec
from runspec.core.schema.source_files import PREFILL_GROUP
from verify.formats.documents import SiteFile
from verify.truncation import Choices, Truncation

TASK_GROUP = "runspec.tasks"
WARM_START_GROUP = "runspec.warm_start"
DATA_GROUP = "runspec.data"
REPLAY_GROUP = "runspec.replay"


@dataclass(frozen=True)
class Problem:
    problem_id: str
    task_type: str
    """Name of the reward that grades it."""
    prompt: str
    verification: Mapping[str, Any]
    """Data for the grader that the policy never sees; plain JSON, because a pipe carries it."""


@dataclass(frozen=True)
class Graded:
    """Reward of one rollout: R = T + P (docs/rewards.md has the length terms P)."""

    task_reward: float
    length_penalty: float
    reward: float
    reason: str = ""
    answered: bool = True
    """Whether the output has an answer in the form that the run asks for."""
    repeatable: bool = True
    """Whether grading again must give the same task reward. False if it depends on time or on the
    model's own program; an honest claim may then differ from a validator's result."""


class GraderFault(Exception):
    """Raised if the grader itself failed. The group is dropped, and the worker is not at fault."""


class Episode(Protocol):
    """One rollout of several turns, as a worker plays it and a validator replays it."""

    per_turn: int
    """Tokens of a turn, at most; see `verify.formats.turns.turn_room`."""
    fault: GraderFault | None
    """Why the environment failed at the newest turn, or at its start."""

    def follow(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        """Play the newest turn.

        Args:
            turns: the policy's tokens of all turns so far; the first turn begins anew.

        Returns:
            The tokens between this turn and the next; None if the rollout is over.
        """


@dataclass(frozen=True)
class GradeItem:
    """One output to grade."""

    problem: int
    """Index into the task set."""
    target: int | None
    """Length that the prompt asked for, in tokens."""
    output_tokens: Sequence[int]
    """Output tokens of all turns, end tokens included."""
    episode: Episode | None = None
    """The episode of several turns, played to its end; None for one turn."""


class TaskSet(Protocol):
    """A run's problems, prompts and grading: the same for sampler, validator and warm start."""

    eos_token_id: int
    targets: list[int]
    """Target lengths of the run, empty where it has none."""
    data_digest: str
    """Digest of the problems' files (`runspec.core.schema.source_files.data_digest`)."""

    def __len__(self) -> int:
        """Return the number of problems left after the filters (solve rate, length of prompts)."""

    def problem(self, index: int) -> Problem: ...

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        """Return the prompt tokens of a problem; those of several turns may depend on a seed."""

    def episode(self, index: int, seed: int) -> Episode | None:
        """Return a new episode of a problem; None if it has one turn."""
        return None

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        """Grade outputs, in the order given; several threads may call this at once.

        Returns:
            The grade of each output, or a fault if the grader raised, hung, died or returned no
            finite number.

        Raises:
            UserError: this machine cannot grade.
        """

    def close(self) -> None:
        """End the graders; nothing can be graded after this."""


Split = Literal["train", "held_out"]
"""Problems that a run trains on, or problems that only measure its warm start."""


@dataclass(frozen=True)
class Trace:
    """One supervised example of the warm start."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    """Thinking, `</think>`, answer, end token: all that counts as length."""
    answer_start: int
    """Index in `output_tokens` of the answer's first token. The answer goes to the end, the end
    token included, so the product of its probabilities is the chance of a right answer."""
    own: list[bool] | None = None
    """Which of `output_tokens` the policy is to say; None: all of them."""


class WarmStartData(Protocol):
    """Data that the warm start trains on, and the tokenizer of the model that it makes."""

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into an existing directory."""

    def traces(self, rng: np.random.Generator, count: int, split: Split) -> list[Trace]:
        """Draw traces; the same state of `rng` gives the same traces.

        No problem is in both splits.
        """

    @property
    def eos_token_id(self) -> int:
        """The end token, for config.json."""

    @property
    def pad_token_id(self) -> int:
        """The padding token, for config.json."""


@dataclass(frozen=True)
class PrefillInput:
    """One rollout to recompute."""

    prompt_tokens: np.ndarray
    """i32 [P]."""
    output_tokens: np.ndarray
    """i32 [n]: all that follows the prompt, up to the last token that the policy sampled."""
    noise_key: tuple[int, int] | None
    """Words of `verify.noise.noise_key`; None where sampling was not seeded."""
    end_token: int | None = None
    """The end token, if sampling was not seeded and `PrefillOutput.choices` is wanted."""
    own: np.ndarray | None = None
    """bool [n]: the output's m tokens that the policy sampled, the first and the last among them;
    None if it sampled all. The numbers of `PrefillOutput` are of these alone, and so is the
    position of the noise: the index among them."""

    @property
    def sampled(self) -> np.ndarray:
        """Indices into `output_tokens` of the tokens that the policy sampled, [m]."""
        return np.arange(len(self.output_tokens)) if self.own is None else np.flatnonzero(self.own)


def by_prompt(prompts: Iterable[np.ndarray]) -> list[list[int]]:
    """Return for each prompt the indices of those equal to it, both in the order of the prompts."""
    found: dict[bytes, list[int]] = {}
    for number, each in enumerate(prompts):
        found.setdefault(each.astype(np.int32).tobytes(), []).append(number)
    return list(found.values())


def require_fits(inputs: Sequence[PrefillInput], row_tokens: int) -> None:
    """Require that no rollout is longer than the learner's rows, for which engines are made.

    Args:
        inputs: at least one rollout.
        row_tokens: `learner.packing.tokens`.

    Raises:
        UserError: a rollout is longer.
    """
    longest = max(len(each.prompt_tokens) + len(each.output_tokens) for each in inputs)
    if longest > row_tokens:
        raise UserError(
            f"a rollout has {longest} tokens, the learner's rows {row_tokens}",
            place="learner.packing.tokens",
            remedy=f"raise it to at least {longest}",
        )


@dataclass(frozen=True)
class PrefillOutput:
    """Numbers of each token that the policy sampled, m of them, under the policy version."""

    logprobs: np.ndarray
    """f32 [m]: log_softmax(logits / T) at the output token, after top-k / top-p."""
    hidden: np.ndarray
    """u16 [m, D]: bits of the bf16 final hidden state, after the last norm, that produced it."""
    seeded_gap: np.ndarray | None
    """f32 [m]: max_v(logits_v / T + noise_v) minus the value at the output token; 0 if that is the
    maximum."""
    choices: Choices | None = None
    """Numbers of the distributions of unseeded tokens (`verify.truncation.describe`)."""


@dataclass(frozen=True)
class WeightsLocation:
    """Where a prefill engine finds the published versions, and the root key that it trusts."""

    run: str
    urls: Sequence[str]
    """Origin or relays, as `broadcast` serves them."""
    root_public_key: str
    cache_dir: Path
    """Folder of fetched versions; several processes may share it."""

    @property
    def data_dir(self) -> Path:
        """Folder of the fetched files of problems, as <source>/<name>; it is shared too."""
        return self.cache_dir.with_name("data")

    @classmethod
    def of(cls, role: Role) -> WeightsLocation:
        """Return where a role of a run finds them."""
        return cls(role.spec.name, role.weights(), role.root_public_key, role.versions)


class PrefillEngine(Protocol):
    """Recomputes rollouts under a policy version."""

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        """Fetch a version if it is missing, and return its weights directory.

        Raises:
            UserError: it did not arrive by the deadline, or the digest names another version.
        """

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        """Recompute rollouts under a version that `ensure_version` returned.

        Args:
            version: version of the policy.
            inputs: the rollouts; all of a call have the same end token.
            temperature: T.
            truncation: top-k and top-p; None if nothing is cut. Log-probs and gaps are then those
                of `verify.truncation.judged`.

        Returns:
            The output of each rollout, in order.

        Raises:
            UserError: a rollout is longer than `learner.packing.tokens`.
        """

    def close(self) -> None:
        """Close connections; the engine cannot be used after this."""


@not_retried()
def load_task_set(
    spec: RunSpec, tokenizer_dir: Path, data_dir: Path | None = None, *, replays: bool = False
) -> TaskSet:
    """Load the run's task by the entry point `default` of `runspec.tasks`.

    Args:
        spec: the resolved spec.
        tokenizer_dir: folder with tokenizer.json and tokenizer_config.json, such as any weights
            directory.
        data_dir: folder with the sources' files as <source>/<name>; None: they are at `uri`.
        replays: whether episodes are replayed, so that calls get a share of their limits.
    """
    build = _load(TASK_GROUP, "default")
    task_set: TaskSet = build(spec, tokenizer_dir, data_dir, replays=replays)
    return task_set


@not_retried()
def require_graders(spec: RunSpec) -> None:
    """Make sure that this machine can grade for a run, by the entry point `requirements`.

    Raises:
        UserError: a reward executes answers and there is no sandbox, or no plug-in has its kind.
    """
    _load(TASK_GROUP, "requirements")(spec)


@not_retried()
def load_warm_start_data(spec: RunSpec) -> WarmStartData:
    """Load traces and tokenizer of `warm_start` by the entry point `default`."""
    data: WarmStartData = _load(WARM_START_GROUP, "default")(spec)
    return data


def load_prefill_engine(spec: RunSpec, weights: WeightsLocation) -> PrefillEngine:
    """Load the prefill engine that `verify.engine` names."""
    engine: PrefillEngine = _load(PREFILL_GROUP, spec.verify.engine)(spec, weights)
    return engine


def fetch_data(
    weights: WeightsLocation, wanted: Mapping[Path, SiteFile], deadline_s: float
) -> None:
    """Fetch files of the problems to these paths, by the entry point `default` of `runspec.data`.

    Raises:
        UserError: not fetched in time, or one is not published as it is wanted.
    """
    _load(DATA_GROUP, "default")(weights, wanted, deadline_s)


def replay_link(link: JoinLink, what: str, say: Callable[[str], None]) -> bool:
    """Train intervals of a run again, with nothing but its link; a line is said for each.

    It is the entry point `default` of `runspec.replay`.

    Args:
        link: of the run, with its name and root.
        what: see `verify.audit.replay.choose`.
        say: receives the lines.

    Returns:
        Whether none is refuted, or cannot be replayed.

    Raises:
        UserError: one cannot be fetched, or JAX is not installed.
    """
    sound: bool = _load(REPLAY_GROUP, "default")(link, what, say)
    return sound


@not_retried()
def _load(group: str, name: str) -> Any:
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        raise UserError(
            f"no plug-in {name!r}; installed: {', '.join(sorted(found)) or 'none'}",
            place=f"entry points of {group}",
            remedy="install the package that offers it (`make install` for this repository's)",
        )
    try:
        return found[name].load()
    except ImportError as error:  # a package has its entry points even without its extras
        raise UserError(
            f"cannot be loaded: {error}",
            place=f"plug-in {name!r} of {group}",
            remedy="install the extra that brings it (learner for the engine jax, validator-torch "
            f"for torch, tasks for tasks): {install_command('learner')}",
        ) from error
