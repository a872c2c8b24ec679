"""Rules: what each is called, how severe it is, its page, and the function that looks.

A rule's docstring is its page: a first line that says what must hold, then why, the formula and its
source. `examples/<code>/bad.yaml` and `good.yaml` are shown beside it by `runspec explain`, and
tests lint them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.spec_model import model_config
from runspec.core.spec.findings import Number, Severity
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
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


@dataclass(frozen=True)
class Context:
    """What a rule may look at."""

    spec: RunSpec
    files: SpecFiles
    """What it was loaded from."""

    @property
    def folder(self) -> Path:
        """Of the spec's file: local paths in it are relative to it."""
        return self.files.path.parent

    @cached_property
    def _model(self) -> ModelConfig | UserError | None:
        try:
            return model_config(self.spec, self.folder)
        except UserError as error:
            return error

    @property
    def config(self) -> ModelConfig | None:
        """The model's shape; None where it is not known without a network."""
        return self._model if isinstance(self._model, ModelConfig) else None

    @property
    def config_error(self) -> UserError | None:
        """Why a config that is at hand is no shape of ours; only the rule `model-config` asks."""
        return self._model if isinstance(self._model, UserError) else None

    @cached_property
    def tokenizer(self) -> TokenizerFiles | None:
        """The tokenizer that every role will use, where it lies in a local directory."""
        model = self.spec.model
        named = model.hf if model.tokenizer is None else model.tokenizer.hf
        return None if named is None else TokenizerFiles.read(self.folder / named)

    @cached_property
    def lock(self) -> Lock | None:
        """The lock beside the spec; None where there is none.

        Raises:
            UserError: the file is no lock.
        """
        from runspec.core.spec.lock_file import (
            read_lock,  # few specs ask, and its classes take time
        )

        return read_lock(self.files.path, self.files.profile)


@dataclass(frozen=True)
class Violation:
    """One breach of a rule."""

    location: tuple[str | int, ...]
    """Keys, and names of named objects, from the root."""
    message: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """What was measured, by name."""
    suggestion: str = ""
    severity: Severity | None = None
    """The rule's own when None."""
    secret: bool = False
    """The line holds what nobody may see: it is not quoted."""


Check = Callable[[Context], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    code: str
    group: Group
    severity: Severity
    page: str
    """What must hold, why, the formula, its source."""
    check: Check | None = None
    """None where the loader itself finds it."""
    suggestion: str = ""
    """For findings that have none of their own; `{path}` is the finding's."""

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""Every rule by its code, in order of registration."""


def rule(code: str, group: Group, severity: Severity = "error") -> Callable[[Check], Check]:
    """Registers a function as a rule; its docstring becomes the page."""

    def register(check: Check) -> Check:
        add(Rule(code, group, severity, inspect.cleandoc(check.__doc__ or ""), check))
        return check

    return register


def found_by_loader(
    code: str, suggestion: str = "", *, group: Group = "file", severity: Severity = "error"
) -> Callable[[Callable[[], None]], None]:
    """Registers a rule whose findings the loader makes; the docstring of what follows is its page.

    `suggestion` is for findings that have none of their own; `{path}` in it is the finding's.
    """

    def register(page: Callable[[], None]) -> None:
        text = inspect.cleandoc(page.__doc__ or "")
        add(Rule(code, group, severity, text, suggestion=suggestion))

    return register


def add(new: Rule) -> None:
    """Registers a rule."""
    assert new.code not in RULES, f"two rules are called {new.code}"
    assert new.page, f"the rule {new.code} has no page"
    RULES[new.code] = new


def violations(context: Context) -> Iterator[tuple[Rule, Violation]]:
    """Every breach of every rule."""
    for one in RULES.values():
        if one.check is not None:
            for violation in one.check(context):
                yield one, violation
