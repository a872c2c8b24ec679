"""Registry of the rules: code, group, severity, page and check function; and what a check may use.

A rule that compares fields is a row of `rules/*.toml` (`runspec.lint.table`), any other a function.
A function's docstring is its page, a row has it as `page`. Its first line says what must hold; then
follow the reason, the formula and its source. `runspec explain` shows it with
`examples/<code>/bad.yaml` and `good.yaml`, which tests lint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.spec_model import model_config
from runspec.core.spec.findings import Number, Severity
from runspec.core.spec.islands import island_spec, members
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import IslandMember, RunSpec
from runspec.lint.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from runspec.core.spec.lock_file import Lock


Group = Literal[
    "file",
    "model",
    "algorithm",
    "reward",
    "mesh",
    "memory",
    "samplers",
    "asynchrony",
    "verification",
    "reproducibility",
    "security",
    "placement",
]

Runs = Literal["all", "grpo", "supervised"]
"""Kinds of `algorithm` that a rule is about; `supervised` are `pretrain` and `sft`."""
_MACHINE: tuple[Group, ...] = ("mesh", "memory")
"""Groups whose rules look at each island of a learner."""
_SAMPLED: tuple[Group, ...] = ("reward", "samplers", "verification")
"""Groups whose rules are about `grpo` unless they say otherwise."""

STATE_SHARE = 0.9
"""Share of a device's memory that the train state may take."""
MAX_DIVISOR = 4096
"""Largest divisor: no mesh is larger, and a spec may say 10 ** 30."""


@dataclass(frozen=True)
class Context:
    """Input of a rule's check."""

    spec: RunSpec
    files: SpecFiles
    """Files that the spec was loaded from."""

    @property
    def folder(self) -> Path:
        """Folder of the spec's file, the base of relative paths in it."""
        return self.files.path.parent

    @cached_property
    def _model(self) -> ModelConfig | UserError | None:
        try:
            return model_config(self.spec, self.folder)
        except UserError as error:
            return error

    @property
    def config(self) -> ModelConfig | None:
        """Shape of the model; None if it is not known without a network."""
        return self._model if isinstance(self._model, ModelConfig) else None

    @property
    def config_error(self) -> UserError | None:
        """Error of a local config.json, for the rule `model-config`; None if there is none."""
        return self._model if isinstance(self._model, UserError) else None

    @cached_property
    def tokenizer(self) -> TokenizerFiles | None:
        """Tokenizer of every role; None if it is not in a local directory."""
        model = self.spec.model
        named = model.hf if model.tokenizer is None else model.tokenizer.hf
        return None if named is None else TokenizerFiles.read(self.folder / named)

    @cached_property
    def lock(self) -> Lock | None:
        """Lock beside the spec; None if there is none.

        Raises:
            UserError: the file is not a valid lock.
        """
        from runspec.core.spec.lock_file import read_lock  # slow to import, and seldom needed

        return read_lock(self.files.path, self.files.profile)


@dataclass(frozen=True)
class Violation:
    """One breach of a rule."""

    location: tuple[str | int, ...]
    """Keys, and names of named objects, from the root."""
    message: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """Measured values by name."""
    suggestion: str = ""
    severity: Severity | None = None
    """Severity; None: that of the rule."""
    secret: bool = False
    """Whether the line holds a secret: findings then do not quote it."""


Check = Callable[[Context], Iterator[Violation]]
ModelCheck = Callable[[Context, ModelConfig], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    code: str
    group: Group
    severity: Severity
    page: str
    """What must hold, the reason, the formula, its source."""
    check: Check | None = None
    """Check function; None if the loader makes the findings."""
    suggestion: str = ""
    """Suggestion for findings without one; `{path}` is the finding's."""
    runs: Runs = "all"

    def is_about(self, spec: RunSpec) -> bool:
        """Return whether the rule is about runs of the spec's kind."""
        return self.runs in ("all", "grpo" if spec.supervised is None else "supervised")

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""Every rule by its code, in order of registration."""


def rule(
    code: str, group: Group, severity: Severity = "error", runs: Runs | None = None
) -> Callable[[Check], Check]:
    """Register a function as a rule; its docstring becomes the page.

    Args:
        code, group, severity: of the rule.
        runs: kinds of runs that it is about; None: as its group.
    """

    def register(check: Check) -> Check:
        page = inspect.cleandoc(check.__doc__ or "")
        add(Rule(code, group, severity, page, check, runs=runs or runs_of(group)))
        return check

    return register


def model_rule(
    code: str, group: Group, severity: Severity = "error", runs: Runs | None = None
) -> Callable[[ModelCheck], ModelCheck]:
    """Register a rule on the model's shape as `rule` does; it finds nothing if that is unknown."""

    def register(check: ModelCheck) -> ModelCheck:
        @rule(code, group, severity, runs)
        @wraps(check)
        def known(context: Context) -> Iterator[Violation]:
            return check(context, context.config) if context.config else iter(())

        return check

    return register


def runs_of(group: Group) -> Runs:
    """Return the kinds of runs that a group's rules are about unless they say otherwise."""
    return "grpo" if group in _SAMPLED else "all"


def add(new: Rule) -> None:
    """Register a rule."""
    assert new.code not in RULES, f"two rules are called {new.code}"
    assert new.page, f"the rule {new.code} has no page"
    RULES[new.code] = new


def violations(context: Context) -> Iterator[tuple[Rule, Violation]]:
    """Find every violation of every rule that is about the spec's kind of run.

    Rules on the learner's machine look at each island, with its own machine and part of a step.
    """
    islands = _islands(context)
    for one in RULES.values():
        if one.check is None or not one.is_about(context.spec):
            continue
        found = _by_island(one.check, islands) if one.group in _MACHINE else one.check(context)
        for violation in found:
            yield one, violation


def _islands(context: Context) -> list[tuple[Context, IslandMember | None]]:
    """Return a context for each island that differs from those before it, with its member.

    The first, or the only one of a spec without islands, has None: its machine is the learner's.
    """
    found: list[tuple[Context, IslandMember | None]] = []
    for member in members(context.spec):
        spec = island_spec(context.spec, member.name)
        if all(spec != other.spec for other, _ in found):
            found.append((replace(context, spec=spec), member if found else None))
    return found or [(context, None)]


def _by_island(
    check: Check, islands: list[tuple[Context, IslandMember | None]]
) -> Iterator[Violation]:
    """Find the violations of each island, those that several share once."""
    seen: list[Violation] = []
    for context, member in islands:
        for violation in check(context):
            if violation not in seen:
                seen.append(violation)
                yield violation if member is None else _of_member(violation, member)


def _of_member(violation: Violation, member: IslandMember) -> Violation:
    """Return an island's violation at the member's own value, or at the member if it has none."""
    location = violation.location
    if location[0] != "learner":
        return violation
    path = location[2:] if location[1:3] == ("packing", "rows") else location[1:]
    own = {
        "hardware": member.hardware,
        "mesh": member.mesh,
        "hosts": member.hosts,
        "rows": member.rows,
    }
    named = path if path and own.get(str(path[0])) is not None else ()
    return replace(violation, location=("learner", "islands", "members", member.name, *named))


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of `number` up to `limit` and `MAX_DIVISOR`, 1 first, for suggestions."""
    return [n for n in range(1, min(number, limit, MAX_DIVISOR) + 1) if number % n == 0]


def gb(size: float) -> str:
    """Return a number of bytes as text, like 65.5 GB."""
    return f"{size / 1e9:.3g} GB"
