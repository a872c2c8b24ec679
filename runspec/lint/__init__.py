"""Registry of the rules: code, group, severity, page and check function; and what a check may use.

A rule is a function of a `Context` that returns or yields violations. Its name is
the code, with `-` for `_`, and its docstring the page. The first line says what must hold; then
follow the reason, the formula and its source. `runspec explain` shows it with
`examples/<code>/bad.yaml` and `good.yaml`, which tests lint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Literal

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.models import ModelConfig
from runspec.core.models.family import model_config
from runspec.core.schema import Hardware, IslandMember, RunSpec
from runspec.core.schema.findings import Number, Severity
from runspec.core.schema.load import SpecFiles
from runspec.core.schema.lock_file import Lock, read_lock
from runspec.core.schema.role_names import island_spec, members

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


Found = Iterable[Violation]
"""What a rule returns or yields."""
Check = Callable[[Context], Found]


def relation(
    holds: bool,
    at: str,
    message: str,
    suggestion: str,
    numbers: Mapping[str, Number] | None = None,
    severity: Severity | None = None,
) -> Found:
    """Return the violation of a relation; none if it holds.

    Args:
        holds: whether it does.
        at: keys, and names of named objects, from the root, joined by dots.
        message, suggestion, numbers, severity: of the violation.
    """
    if holds:
        return ()
    return (Violation(tuple(at.split(".")), message, numbers or {}, suggestion, severity),)


@dataclass(frozen=True)
class Rule:
    code: str
    page: str
    """Docstring of the check: what must hold, the reason, the formula, its source."""
    group: Group
    severity: Severity
    check: Check | None = None
    """Check function; None if the loader makes the findings."""
    suggestion: str = ""
    """Suggestion for findings without one; `{path}` is the finding's."""
    runs: Runs = "all"

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""Every rule by its code, in order of registration."""


def rule(
    group: Group, severity: Severity = "error", runs: Runs | None = None
) -> Callable[[Check], Check]:
    """Register a function as a rule; its name becomes the code, its docstring the page.

    Args:
        group, severity: of the rule.
        runs: kinds of runs that it is about; None: as its group.
    """

    about: Runs = runs or ("grpo" if group in _SAMPLED else "all")

    def register(check: Check) -> Check:
        _add(check, group, severity, check=check, runs=about)
        return check

    return register


def model_rule(
    group: Group, severity: Severity = "error", runs: Runs | None = None
) -> Callable[[Callable[[Context, ModelConfig], Found]], Check]:
    """Register a rule on the model's shape as `rule` does; it finds nothing if that is unknown."""

    def register(function: Callable[[Context, ModelConfig], Found]) -> Check:
        @rule(group, severity, runs)
        @wraps(function)
        def check(context: Context) -> Found:
            return function(context, context.config) if context.config else ()

        return check

    return register


def found_by_loader(
    suggestion: str = "", *, group: Group = "file", severity: Severity = "error"
) -> Callable[[Callable[[], None]], None]:
    """Register a rule whose findings the loader makes; the function has its name and its page.

    Args:
        suggestion: for findings without one; `{path}` is the finding's.
        group, severity: of the rule.
    """

    def register(function: Callable[[], None]) -> None:
        _add(function, group, severity, suggestion=suggestion)

    return register


def _add(function: Callable[..., object], group: Group, severity: Severity, **more: Any) -> None:
    code, page = function.__name__.replace("_", "-"), inspect.cleandoc(function.__doc__ or "")
    assert code not in RULES, f"two rules are called {code}"
    assert page, f"the rule {code} has no page"
    RULES[code] = Rule(code, page, group, severity, **more)


def violations(context: Context) -> Iterator[tuple[Rule, Violation]]:
    """Find every violation of every rule that is about the spec's kind of run.

    Rules on the learner's machine look at each island, with its own machine and part of a step.
    """
    islands, kind = _islands(context), "grpo" if context.spec.supervised is None else "supervised"
    for one in RULES.values():
        if one.check is None or one.runs not in ("all", kind):
            continue
        seen: list[Violation] = []
        for where, member in islands if one.group in _MACHINE else [(context, None)]:
            # Those that several islands share are found once.
            new = [violation for violation in one.check(where) if violation not in seen]
            seen += new
            yield from ((one, _of_member(violation, member)) for violation in new)


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


def _of_member(violation: Violation, member: IslandMember | None) -> Violation:
    """Return an island's violation at the member's own value, or at the member if it has none.

    That of the first island, or the only one, is returned as it is.
    """
    location = violation.location
    if member is None or location[0] != "learner":
        return violation
    path = location[2:] if location[1:3] == ("packing", "rows") else location[1:]
    named = path if path and getattr(member, str(path[0]), None) is not None else ()
    return replace(violation, location=("learner", "islands", "members", member.name, *named))


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of `number` up to `limit` and `MAX_DIVISOR`, 1 first, for suggestions."""
    return [n for n in range(1, min(number, limit, MAX_DIVISOR) + 1) if number % n == 0]


def all_hardware(spec: RunSpec) -> Iterator[tuple[str, Hardware]]:
    """Yield the hardware of learner, pools and validators, with its place in the spec."""
    yield "learner.hardware", spec.learner.hardware
    for pool in spec.samplers:
        yield f"samplers.{pool.name}.hardware", pool.hardware
    if spec.verify.hardware is not None:
        yield "verify.hardware", spec.verify.hardware


MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json and tokenizer_config.json of a directory.

    Malformed parts are left out: `runspec doctor` checks whether a role can load the files.
    """

    folder: Path
    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles | None:
        """Return the files of a directory; None if its tokenizer.json cannot be read."""
        tokenizer = _json_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if tokenizer is None:
            return None
        config = _json_object(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
        return cls(folder, tokenizer, config or {})

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Ids by token, added tokens included."""
        model = self.tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        pairs: list[tuple[Any, Any]] = []
        if isinstance(vocabulary, dict):
            pairs = list(vocabulary.items())
        elif isinstance(vocabulary, list):  # unigram: [token, score] each, in order
            pairs = [
                (row[0], i) for i, row in enumerate(vocabulary) if isinstance(row, list) and row
            ]
        added = self.tokenizer.get("added_tokens")
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict):
                pairs.append((token.get("content"), token.get("id")))
        return {text: id_ for text, id_ in pairs if isinstance(text, str) and type(id_) is int}

    @property
    def largest_id(self) -> int | None:
        return max(self.ids.values(), default=None)

    @property
    def end_token(self) -> str | None:
        """`eos_token`, as text."""
        value = self.config.get("eos_token")
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None

    @property
    def end_ids(self) -> Mapping[str, frozenset[int]]:
        """`eos_token_id` by file, config.json and generation_config.json, if they name any."""
        found = {}
        for name in ("config.json", "generation_config.json"):
            value = (_json_object(self.folder / name, MAX_CONFIG_BYTES) or {}).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if named := frozenset(i for i in ids if type(i) is int):
                found[name] = named
        return found

    @property
    def has_template(self) -> bool:
        return "chat_template" in self.config or (self.folder / "chat_template.jinja").is_file()

    @property
    def template(self) -> str | None:
        """Text of the chat template; None if there is none, or several with names."""
        path = self.folder / "chat_template.jinja"
        try:
            if path.is_file():
                return read_bounded(path, MAX_CONFIG_BYTES).decode(errors="replace")
        except (OSError, UserError):
            return None
        said = self.config.get("chat_template")
        return said if isinstance(said, str) else None


def _json_object(path: Path, max_bytes: int) -> dict[str, Any] | None:
    try:
        if not path.is_file():  # reading a pipe would block
            return None
        value = json.loads(read_bounded(path, max_bytes))
    except (OSError, UserError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
