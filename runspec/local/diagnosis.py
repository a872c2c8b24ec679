"""How a run does, by its own figures: its evaluations, its alarms, and why it does not learn or
learns by heart.

Each cause comes with its numbers and the spec's fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from runspec.core.errors import number, share
from runspec.core.run_files import evaluation_files
from runspec.core.schema import RunSpec
from runspec.local.metrics import Row, mean
from runspec.local.plots import Curve, Figure
from verify.formats.documents import Evaluated, read_evaluations
from verify.formats.documents import Figure as Mean

NEWEST = 20
"""Steps that are judged. With fewer nothing is said."""
RISE = 2.0
"""Standard errors of the difference that a rise must exceed."""
SOLVED = 0.95
"""From this task reward on a run has nothing left to learn."""
MOST_EQUAL = 0.8
"""Share of groups without a difference in reward that starves a run."""
MOST_FAILED = 0.2
"""Share of groups at which the grader failed."""
NEARLY_ALL = 0.95
"""Mean length over the longest possible one."""
COLLAPSED_NATS, COLLAPSED = 0.05, 0.2
"""Entropy, and its share of the first steps', below both of which it has collapsed."""
CLIPPED = 0.3
"""Share of tokens that the clip takes out of the gradient."""
GAP = 0.05
"""Task reward by which held-out problems are at least behind those that are trained on."""
DRIFT_NATS = 0.1
"""Mean |log-prob difference| between learner and samplers from which lag counts as the cause."""


@dataclass(frozen=True)
class Cause:
    """One reason why a run does not learn, or learns what only its own problems need."""

    name: str
    """One word, for programs."""
    text: str
    """What was measured, over the newest steps."""
    fields: tuple[str, ...]
    """Fields of the spec to look at."""

    @property
    def line(self) -> str:
        """The cause as a line by itself."""
        return f"{'warning' if self.name == OWN_PROBLEMS else 'does not learn'}: {self}"

    def __str__(self) -> str:
        return f"{self.name}: {self.text} (look at {', '.join(self.fields)})"


def diagnose(
    spec: RunSpec,
    rows: Sequence[Row],
    failed_groups: int = 0,
    results: Sequence[Evaluated] = (),
) -> list[Cause]:
    """Return why the newest steps did not learn, the likeliest cause first, and whether they learn
    what held-out problems do not need; empty if all is well.

    Args:
        spec: of the run; runs on documents have no diagnosis.
        rows: metrics.jsonl, a row a step, in order.
        failed_groups: groups that the run lost because the grader failed.
        results: of the run's evaluations, in the order of versions.
    """
    if spec.supervised is not None or len(rows) < NEWEST:
        return []
    behind = [*_of_held_out(spec, rows, results)]
    if is_learning(rows):
        return behind
    found = (*behind, *_of_rewards(spec, rows, failed_groups), *_of_updates(spec, rows))
    return [cause for name in _ORDER for cause in found if cause.name == name]


_ORDER = (
    *("GraderFails", "UpdatesSkipped", "CutOff", "NothingRight", "EqualGroups"),
    *("EntropyCollapsed", "RatioClipped", "LagAtLimit", "LengthOutweighs"),
    OWN_PROBLEMS := "DoesNotGeneralise",
)
"""The likeliest causes first."""


def is_learning(rows: Sequence[Row]) -> bool:
    """Return whether the newest steps earn more than the ones before, or all there is to earn.

    Means of `NEWEST` steps are compared; without as many before, the halves of them are.
    """
    if (mean(rows[-NEWEST:], "task_reward") or 0.0) >= SOLVED:
        return True
    before, after = rows[-2 * NEWEST : -NEWEST], rows[-NEWEST:]
    if len(before) < NEWEST:
        before, after = after[: NEWEST // 2], after[NEWEST // 2 :]
    for key in ("task_reward", "reward"):
        first, last = _known(before, key), _known(after, key)
        if len(first) >= 2 and len(last) >= 2 and _rises(first, last):
            return True
    return False


def _rises(first: Sequence[float], last: Sequence[float]) -> bool:
    """Return whether the mean rises by more than its standard errors; two values each at least."""
    error = sqrt(variance(first) / len(first) + variance(last) / len(last))
    return fmean(last) - fmean(first) > max(RISE * error, 1e-6)


def _of_held_out(
    spec: RunSpec, rows: Sequence[Row], results: Sequence[Evaluated]
) -> Iterator[Cause]:
    """Yield whether held-out problems are clearly behind those that are trained on.

    The newest result of each evaluation of problems that training holds out is compared with the
    steps that led to its version. Only a run whose task reward rose up to there has learned by
    heart; one that starts apart has problems of another kind.
    """
    trained = {source.name for source in spec.data.sources if source.train}
    held_out = {each.name for each in spec.evaluations if each.source in (None, *trained)}
    first = _known(rows[:NEWEST], "task_reward")
    for name, result in newest(results).items():
        before = [row for row in rows if row["step"] < result.version][-NEWEST:]
        last, figure = _known(before, "task_reward"), result.figures.get("mean")
        if name not in held_out or figure is None or figure.high is None:
            continue
        if min(len(first), len(last)) < NEWEST:
            continue
        error = RISE * sqrt(variance(last) / len(last))
        if fmean(last) - error > figure.high + GAP and _rises(first, last):
            text = (
                f"{name} of version {result.version} has a task reward of {number(figure.value)} "
                f"({number(figure.low)} to {number(figure.high)}), the steps before it had "
                f"{number(fmean(last))}: more problems generalise, fewer steps keep what there is"
            )
            sources = (f"data.sources.{source}" for source in sorted(trained))
            yield Cause(OWN_PROBLEMS, text, (*sources, "steps", "optimizer.lr"))


def _of_rewards(spec: RunSpec, rows: Sequence[Row], failed: int) -> Iterator[Cause]:
    """Yield what is wrong with problems, grades and answers."""
    newest = rows[-NEWEST:]
    task, reward = mean(newest, "task_reward"), mean(newest, "reward")
    part = failed / (failed + len(rows) * spec.grpo.prompts_per_step)
    if part >= MOST_FAILED:
        terms = (f"reward.{term.name}.timeout" for term in spec.reward if term.targets is None)
        text = f"the grader failed at {share(part)} of all groups"
        yield Cause("GraderFails", text, tuple(terms))
    if task == 0.0:
        fields = ("data.sources", "model", *_of_pools(spec, "max_new_tokens"))
        yield Cause("NothingRight", f"no answer was right in {NEWEST} steps", fields)
    filtered = sum(_known(newest, "filtered_groups"))
    trained = sum(_known(newest, "trained_rollouts")) / spec.grpo.group_size
    if filtered and filtered / (filtered + trained) >= MOST_EQUAL:
        yield Cause(
            "EqualGroups",
            f"in {share(filtered / (filtered + trained))} of the groups all answers earned the "
            f"same; the task reward is {number(task)}",
            ("data.sources.NAME.solve_rate", "algorithm.group_size"),
        )
    longest = max(pool.max_new_tokens for pool in spec.samplers)
    length = mean(newest, "length_mean")
    if length is not None and length >= NEARLY_ALL * longest:
        text = f"the mean output has {number(length)} tokens, and {longest} are the most"
        yield Cause("CutOff", text, _of_pools(spec, "max_new_tokens"))
    terms = (f"reward.{term.name}.alpha" for term in spec.reward if term.targets is not None)
    fields = tuple(terms)
    if fields and task is not None and reward is not None and task - reward > max(task, 1e-9):
        text = f"the length term takes {number(task - reward)}, the task gives {number(task)}"
        yield Cause("LengthOutweighs", text, fields)


def _of_updates(spec: RunSpec, rows: Sequence[Row]) -> Iterator[Cause]:
    """Yield what is wrong with the updates."""
    newest = rows[-NEWEST:]
    first, last = mean(rows[:NEWEST], "entropy"), mean(newest, "entropy")
    if first is not None and last is not None and last <= min(COLLAPSED_NATS, COLLAPSED * first):
        text = f"the entropy fell from {number(first)} to {number(last)} nats a token"
        temperatures = _of_pools(spec, "sampling.temperature")
        fields = ("algorithm.entropy_coef", "optimizer.lr", *temperatures)
        yield Cause("EntropyCollapsed", text, fields)
    sides = ("clip_fraction_low", "clip_fraction_high", "clip_fraction_delta")
    part = sum(mean(newest, side) or 0.0 for side in sides)
    if part >= CLIPPED:
        text = f"the clip takes {share(part)} of the tokens out of the gradient"
        fields = ("algorithm.clip", "optimizer.lr", "algorithm.async_level")
        yield Cause("RatioClipped", text, fields)
    lag, drift, most = mean(newest, "lag_mean"), mean(newest, "policy_drift"), spec.grpo.async_level
    if most and lag is not None and lag >= most - 0.1 and (drift or 0.0) >= DRIFT_NATS:
        yield Cause(
            "LagAtLimit",
            f"rollouts are {number(lag)} steps old, and at most {most}; the policy has moved "
            f"{number(drift)} nats a token since",
            ("algorithm.async_level", "optimizer.lr", "algorithm.importance.cap"),
        )
    steps = sum(skipped > 0 for skipped in _known(newest, "skipped_updates"))
    if steps >= NEWEST // 2:
        text = f"updates were skipped in {steps} of {NEWEST} steps: their gradients are not finite"
        yield Cause("UpdatesSkipped", text, ("optimizer.lr", "optimizer.clip_norm", "learner"))


def _of_pools(spec: RunSpec, field: str) -> tuple[str, ...]:
    return tuple(f"samplers.{pool.name}.{field}" for pool in spec.samplers)


def _known(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def dropped_text(groups: int, newest: str) -> str:
    """Says how many groups the grader made a run lose, and what it failed with last."""
    return f"{groups} groups dropped by the grader, the newest: {newest}"


def alarm_text(row: Row) -> str:
    """Return the text of a step's alarm; empty without one."""
    if not row.get("sampler_logprob_alarm"):
        return ""
    apart, limit = row.get("sampler_logprob_diff_mean"), row.get("sampler_logprob_limit")
    return (
        f"step {row.get('step')}: the samplers' log-probs are {number(apart)} from the learner's "
        f"on average, verify.logprob_alarm is {number(limit)}"
    )


def unsolved_text(row: Row) -> str:
    """Return the text for a step whose rollouts were all wrong; empty where one was right."""
    if row.get("task_reward") != 0:
        return ""
    return (
        f"no rollout of step {row.get('step')} was right, so nothing is learned from it: read the "
        "answers in samples.jsonl, measure with `python -m sampler solve-rates`, then take easier "
        "problems or a better starting model (docs/first-run.md)"
    )


SECTION = "Evaluations"
HELD_OUT, LOSS = "held-out", "loss"
"""Evaluation of runs that train on documents, and its figure in nats a token."""
_TITLES = {
    LOSS: ("loss", "Mean loss of a held-out token, in nats"),
    "bits-per-byte": ("bits a byte", "Loss of the held-out documents over their bytes"),
    "mean": ("task reward", "Mean task reward of all answers"),
    "pass": ("pass@k", "Chance that one of k answers solves a problem"),
    "majority": ("majority", "Task reward of the most frequent answer to a problem"),
    "length": ("length", "Mean output in tokens, the end token included"),
    "length-error": ("length error", "Mean distance from the length asked for, in tokens"),
}
"""Title and caption by figure."""


def results_of(run_dir: Path, rows: Iterable[Row]) -> list[Evaluated]:
    """Return a run's results in the order of versions.

    They are those of the evaluator, or, in a run that trains on documents, what the learner
    measured on the documents of `algorithm.held_out`, in the same form. Nobody signed that.

    Args:
        run_dir: of the run.
        rows: of metrics.jsonl.

    Raises:
        UserError: a file is not a result.
    """
    found = read_evaluations(evaluation_files(run_dir))
    for row in rows:
        if row.get("held_out_nll") is not None:
            values = {LOSS: row["held_out_nll"], "bits-per-byte": row["held_out_bits_per_byte"]}
            figures = {name: Mean(value, None, None) for name, value in values.items()}
            at = (run_dir.name, HELD_OUT, row["version"], None)
            found.append(Evaluated(*at, figures, 0, [], row["time"], wall_s=0.0, cpu_s=0.0))
    return found


def evaluation_names(spec: RunSpec) -> list[str]:
    """Return the names of a run's evaluations."""
    if spec.supervised is not None:
        return [HELD_OUT] if spec.supervised.held_out.tokens else []
    return [each.name for each in spec.evaluations]


def main_figure(result: Evaluated) -> str:
    """Return the figure that stands for a result."""
    return LOSS if LOSS in result.figures else "mean"


def newest(results: Sequence[Evaluated]) -> dict[str, Evaluated]:
    """Return the result of the newest version, by evaluation; results are in order of versions."""
    return {result.evaluation: result for result in results}


def result_line(result: Evaluated) -> str:
    """Return a result as one line."""
    parts = []
    for name in in_order(result.figures):
        mean = result.figures[name]
        ends = "" if mean.low is None else f" ({number(mean.low)} to {number(mean.high)})"
        parts.append(f"{name} {number(mean.value)}{ends}")
    if result.faults:
        parts.append(f"{result.faults} answers without a grade")
    return f"version {result.version}: {', '.join(parts) or 'no answer was graded'}"


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of figures in the order of `_TITLES`, and by K."""
    kinds = list(_TITLES)

    def place(name: str) -> tuple[int, int]:
        kind, _, k = name.partition("-")
        kind, k = (kind, k) if k.isdecimal() else (name, "0")
        return kinds.index(kind) if kind in kinds else len(kinds), int(k)

    return sorted(names, key=place)


def figure_title(name: str) -> str:
    """Return a figure's name for people, like `pass@4` or `length error`."""
    kind, _, k = name.partition("-")
    return f"pass@{k}" if kind == "pass" else _TITLES.get(name, (name, ""))[0]


def summarise_evaluations(results: Sequence[Evaluated]) -> dict[str, Any]:
    """Return `evaluations` of summary.json: each with its versions, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in results:
        figures = {name: [mean.value, mean.low, mean.high] for name, mean in each.figures.items()}
        row: dict[str, Any] = {"version": each.version, **figures}
        if LOSS not in figures:  # answers were graded
            row |= {"faults": each.faults, "cpu_s": each.cpu_s}
        found.setdefault(each.evaluation, []).append(row)
    return found


def evaluation_plots(results: Sequence[Evaluated]) -> list[Figure]:
    """Return the plots of all evaluations over versions, with their 95 % intervals."""
    found = []
    for evaluation in dict.fromkeys(result.evaluation for result in results):
        own = [result for result in results if result.evaluation == evaluation]
        for kind, (title, caption) in _TITLES.items():
            if curves := list(_curves(own, kind)):
                bottom = 0.0 if kind.startswith("length") else None
                text = f"{caption}; bands are 95 % intervals over problems."
                found.append(Figure(f"{evaluation}: {title}", text, curves, bottom))
    return found


def _curves(results: Sequence[Evaluated], kind: str) -> Iterator[Curve]:
    names = dict.fromkeys(name for result in results for name in result.figures)
    for name in in_order(names):
        if name == kind or (kind == "pass" and name.startswith("pass-")):
            known = [(r.version, r.figures[name]) for r in results if name in r.figures]
            yield Curve(
                name if kind == "pass" else "",
                [(version, mean.value) for version, mean in known],
                averaged=False,
                band=[
                    (version, mean.low, mean.high)
                    for version, mean in known
                    if mean.low is not None and mean.high is not None
                ],
            )
