"""The estimate of a run, from what is known on this machine, and for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from statistics import fmean

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runspec.core.errors import UserError, duration, number, size
from runspec.core.models import ModelConfig
from runspec.core.schema import RunSpec
from runspec.core.schema.source_files import source_files
from runspec.estimate.assumed import with_cpu_speeds
from runspec.estimate.broadcast import Arrival, IslandEstimate, IslandsEstimate
from runspec.local.metrics import objects
from runspec.plan.estimate import (
    LearnerEstimate,
    RunEstimate,
    SupervisedEstimate,
    Timeline,
    estimate_run,
)
from runspec.simulate import BROADCAST, LEARNER, VALIDATORS, Interval

_LEVELS = " ▁▂▃▄▅▆▇█"
_COLOURS = {LEARNER: "green", BROADCAST: "blue", VALIDATORS: "magenta"}
_POOL_COLOUR = "cyan"
_BAR = 20
_PROMPT_BYTES = 1 << 20
"""How much of a file of problems is read for the lengths of prompts."""
_KNOWN_BY = {"model.hf": "model.hf, as a directory with a config.json"}
"""Fields that are set and say too little; the others are not set."""


def estimate_here(spec: RunSpec, config: ModelConfig | None) -> RunEstimate:
    """`estimate_run` with the prompts that this machine can read, and guesses for CPUs.

    The source of such a figure is not the field of the spec, which gives none.
    """
    read = None if spec.supervised is not None else prompt_tokens(spec)
    sources = dict[str, str]()
    if read is not None and spec.estimate.mean_prompt_tokens is None:
        tokens, sources["estimate.mean_prompt_tokens"] = read
        told = spec.estimate.model_copy(update={"mean_prompt_tokens": tokens})
        spec = spec.model_copy(update={"estimate": told})
    if config is not None:
        spec, guessed = with_cpu_speeds(spec, config)
        sources |= {field: f"a guess for CPUs: set {field}" for field in guessed}
    found = estimate_run(spec, config)
    assumed = (
        replace(each, source=sources.get(each.source, each.source)) for each in found.assumed
    )
    return replace(found, assumed=tuple(assumed))


def prompt_tokens(spec: RunSpec) -> tuple[float, str] | None:
    """Return about the mean prompt length of the first rows of JSON Lines, and what it is from.

    A tokenizer made by the run writes about every character as a token, others about four
    characters. Prompts over `data.max_prompt_tokens` are left out, as the run does. None where no
    source has rows here.
    """
    characters = 1 if spec.model.shape is not None else 4
    lengths, names = list[float](), list[str]()
    for source in spec.data.sources:
        column = {"gsm8k": "question", "jsonl": str(source.params.get("prompt", "prompt"))}
        if source.kind not in column or not source.train:
            continue
        try:
            path = next(iter(source_files(source).values()))
            with path.open("rb") as file:
                rows = objects(file.read(_PROMPT_BYTES))
        except (UserError, OSError, StopIteration):
            continue  # what is missing is said below the estimate
        before = len(str(source.params.get("instruction", ""))) + len(spec.data.system_prompt or "")
        prompts = (row.get(column[source.kind]) for row in rows)
        found = [(before + len(text)) / characters for text in prompts if isinstance(text, str)]
        if kept := [length for length in found if length <= spec.data.max_prompt_tokens]:
            lengths, names = lengths + kept, [*names, source.name]
    if not lengths:
        return None
    each = "one character" if characters == 1 else f"{characters} characters"
    return fmean(lengths), f"{len(lengths):,} rows of {', '.join(names)}, {each} a token"


def show_estimate(estimate: RunEstimate, console: Console) -> None:
    """Prints every part that is known, and what the spec would have to say for the rest.

    Args:
        estimate: of the run.
        console: where to; tables fit 80 columns.
    """
    if estimate.parameters is not None:
        published = f", a version is {size(estimate.version_bytes or 0)}"
        _title(console, "Model", f"{_count(estimate.parameters)} parameters{published}")
    if estimate.audit_bytes is not None:
        kept = size(estimate.audit_bytes)
        _say(console, f"published full states, and what was trained on: {kept} of disk")
    if estimate.learner.memory is not None:
        islands = estimate.islands
        _learner(estimate.learner, console, islands.islands[0].name if islands else None)
    if estimate.parameters is not None and estimate.samplers:
        _samplers(estimate, console)
    if estimate.parameters is not None and (estimate.arrivals or estimate.supervised is None):
        _broadcast(estimate, console)
    if estimate.islands is not None:
        _islands(estimate.islands, console)
    if estimate.supervised is not None:
        _supervised(estimate, estimate.supervised, console)
    if estimate.timeline is not None:
        _step(estimate, estimate.timeline, console)
    elif estimate.stalled:
        _title(console, "Step", f"the simulated run trains too few steps: {estimate.stalled}")
    elif estimate.unknown:
        _title(console, "Step", "its time is not known; to know it, say in the spec")
        for field in estimate.unknown:
            _say(console, _KNOWN_BY.get(field, field))
    if (cost := estimate.cost) is not None:
        whole = "" if cost.run is None else f", {cost.run:,.0f} for the run"
        currency = "in the currency of price_per_hour"
        _title(console, "Cost", f"{cost.per_hour:,.2f} an hour{whole}, {currency}")
        table = _table("role", ">an hour")
        for role, price in cost.by_role.items():
            table.add_row("", role, f"{price:,.2f}")
        console.print(table)
    _title(console, "Rests on")
    table = _table("", ">value", "from")
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    for entry in estimate.assumed:
        source = Text(entry.source, style="bright_black")
        table.add_row("", entry.name, _amount(entry.value, entry.unit), source)
    console.print(table)


def _title(console: Console, name: str, text: str = "") -> None:
    console.print()
    console.print(Text.assemble((name, "bold"), "  " if text else "", text), soft_wrap=True)


def _say(console: Console, text: str, style: str = "") -> None:
    """A sentence, wrapped under itself."""
    console.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False))


def _table(*columns: str) -> Table:
    """Make a table without lines; names starting with > are columns of numbers."""
    table = Table(box=None, padding=(0, 1), header_style="bright_black", pad_edge=False)
    table.add_column("", width=0)
    for column in columns:
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True
        )
    return table


def _learner(learner: LearnerEstimate, console: Console, island: str | None) -> None:
    memory = learner.memory
    assert memory is not None
    devices, of_island = learner.devices or "its", f"island {island}, " if island else ""
    which = "its device" if devices == 1 else f"each of {devices} devices"
    _title(console, "Learner", f"{of_island}memory of {which} when most is needed")
    parts = {name: part for name, part in asdict(memory).items() if name not in ("moment", "host")}
    largest = max(parts.values())
    table = _table("part", ">bytes", "")
    for name, bytes_ in sorted(parts.items(), key=lambda item: -item[1]):
        if bytes_:
            bar = "█" * round(_BAR * bytes_ / largest) or "▏"
            table.add_row("", name, size(bytes_), Text(bar, style="green"))
    console.print(table)
    if learner.device_memory is None:
        _say(console, f"together {size(memory.total)}; the device's memory is not known")
    else:
        share = memory.total / learner.device_memory
        style = "red" if share > 1 else "green"
        line = f"together {size(memory.total)} of {size(learner.device_memory)}, {share:.0%}"
        _say(console, line, style)
    if memory.host:
        _say(console, f"and {size(memory.host)} in the host's memory")
    if learner.step_s is not None:
        _say(console, f"trains a step in {_time(learner.step_s)}")
    if learner.shared_prompts:
        _say(console, "computes a prompt once for all samples of its group")


def _islands(islands: IslandsEstimate, console: Console) -> None:
    """Print what islands send in a step, and what of it they wait for."""
    smaller = islands.whole_bytes / islands.share_bytes
    times = f", {smaller:.3g} times smaller than float32" if smaller > 1 else ""
    share = f"a share is {size(islands.share_bytes)} as {islands.codec}{times}"
    _title(console, "Islands", f"{share}; bytes and times of a step")
    columns = ("devices", ">up", ">down", ">exchange", ">updates", ">busy")
    table = _table("island", *columns)
    alike: dict[IslandEstimate, list[IslandEstimate]] = {}
    for each in islands.islands:  # those of which only the names differ are one row
        alike.setdefault(replace(each, name=""), []).append(each)
    for each, *others in alike.values():
        count = 1 + len(others)
        table.add_row(
            "",
            f"{each.name} ({count} alike)" if count > 1 else each.name,
            f"{number(each.devices)} x {each.hardware}",
            size(each.up_bytes),
            size(each.down_bytes),
            _time(each.transfer_s) if each.transfer_s else "-",
            "-" if each.compute_s is None else _time(each.compute_s),
            "-" if each.utilization is None else f"{each.utilization:.1%}",
        )
    console.print(table)
    if not any(each.transfer_s for each in islands.islands):
        _say(console, "no link is declared: what they send counts as there at once")
    memory, work = size(islands.host_bytes), _time(islands.host_s)
    _say(console, f"to make and read shares, a host needs {memory} of memory and {work} a step")
    if islands.exposed_s is not None:
        how = "beside the next step's updates" if islands.overlap else "between two steps"
        slowest = f"the slowest waits {_time(islands.exposed_s)} a step"
        waits = slowest if islands.exposed_s else "nobody waits"
        _say(console, f"they exchange shares {how}; {waits}")


def _samplers(estimate: RunEstimate, console: Console) -> None:
    _title(console, "Samplers", "memory of a device, sequences that fit, speed of a replica")
    columns = (">replicas", ">weights", ">KV room", ">KV tokens", ">full length", ">tokens/s")
    table = _table("pool", *columns)
    for pool in estimate.samplers:
        memory = pool.memory
        assert memory is not None
        room = "-" if memory.room is None else size(max(0.0, memory.room))
        table.add_row(
            "",
            pool.name,
            f"{pool.replicas} x {pool.devices}",
            size(memory.weights),
            room if memory.room is None or memory.room > 0 else Text("none", style="red"),
            "-" if memory.kv_tokens is None else _count(memory.kv_tokens),
            number(memory.full_sequences),
            "-" if pool.tokens_per_s is None else f"{pool.tokens_per_s:,.0f}",
        )
    console.print(table)
    for pool in estimate.samplers:
        memory = pool.memory
        if memory is not None and memory.spare is not None and memory.captured > memory.spare:
            note = (
                f"{pool.name}: the records that its proofs are made from take "
                f"{size(memory.captured)} beside vLLM, which leaves {size(memory.spare)}"
            )
            _say(console, note, "yellow")


def _broadcast(estimate: RunEstimate, console: Console) -> None:
    if not estimate.arrivals:
        _title(console, "Broadcast", "no link is declared: it counts as instantaneous")
        return
    slowest = estimate.arrivals[-1]
    _title(console, "Broadcast", f"{_time(slowest.seconds)} until all have a version")
    joiner, whole = estimate.joiner_bytes, estimate.version_bytes
    follower = estimate.follower_bytes
    if whole and follower and joiner and follower < whole:
        note = (
            f"as a delta of {size(follower)}, {whole / follower:.0f} times smaller; who joins "
            f"fetches up to {size(joiner)}, in {_time(joiner / slowest.rate)} at the slowest"
        )
        _say(console, note)
    table = _table("path", ">rate", ">time", "limited by")
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    for path, arrival in _same_paths(estimate.arrivals):
        rate = _amount(8 * arrival.rate, "bits/s")
        table.add_row("", path, rate, _time(arrival.seconds), arrival.limit)
    console.print(table)


def _same_paths(arrivals: Sequence[Arrival]) -> Iterator[tuple[str, Arrival]]:
    """Yield one row for the replicas of a pool that arrive alike."""

    def what(arrival: Arrival) -> tuple[float, str, tuple[str, ...], str]:
        family = arrival.name.rpartition("-")[0]
        return arrival.seconds, arrival.limit, arrival.path[:-1], family

    for _, alike in groupby(sorted(arrivals, key=what), what):
        members = list(alike)
        name = members[0].name
        if len(members) > 1:
            name = f"{name.rpartition('-')[0]} ({len(members)})"
        yield " > ".join((*members[0].path[1:-1], name)), members[0]


def _step(estimate: RunEstimate, step: Timeline, console: Console) -> None:
    total = f", {estimate.steps} steps {_time(estimate.run_s or 0.0)}"
    _title(console, "Step", f"{_time(step.step_s)} once the run has settled{total}")
    width = max(20, min(72, console.width - 34))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=0)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, width=width)
    table.add_column(no_wrap=True, justify="right")
    roles = {LEARNER: 1, BROADCAST: 1}  # how many work in each, in the order of a version's way
    roles |= {pool.name: pool.replicas for pool in estimate.samplers}
    roles |= {VALIDATORS: estimate.validators} if estimate.validators else {}
    for role, members in roles.items():
        mine = [i for i in step.intervals if i.role == role]
        if role == BROADCAST:
            mine = _union(mine)
        bar = Text(_lane(mine, members, step.step_s, width), style=_COLOURS.get(role, _POOL_COLOUR))
        table.add_row("", role, bar, f"idle {step.idle.get(role, 1.0):.0%}")
    ends = f"0{_time(step.step_s):>{width - 1}}"
    table.add_row("", "", Text(ends, style="bright_black"), "")
    console.print(table)
    rollouts, full = _time(step.first_rollouts_s), _time(step.full_s)
    begun = f"from a step's first lease: first rollouts after {rollouts}, batch full after {full}"
    _say(console, f"{begun}; lag {step.lag:.2g}")
    _say(console, f"limited by {step.bottleneck}, which is idle for the least time")
    if step.filled_share < 1.0:
        deadline = _time(estimate.fill_deadline_s or 0.0)
        note = (
            f"{step.filled_share:.0%} of the groups train: algorithm.fill.deadline ({deadline}) or "
            "fill.max_groups ends steps before they are full; raise it, or add replicas"
        )
        _say(console, note, "red")
    hours = estimate.max_hours
    if hours is not None and estimate.run_s is not None and estimate.run_s > 3600 * hours:
        _say(console, f"budget.max_hours is {hours:g}: the run stops before its last step", "red")


def _supervised(estimate: RunEstimate, run: SupervisedEstimate, console: Console) -> None:
    """Print the tokens, FLOPs and time of a step and of the run, and how often a version is out."""
    _title(console, "Training", f"{_count(run.step_tokens)} tokens a step, padding included")
    by_all = ", those of all islands together" if estimate.islands else ""
    microbatches = _counted(run.microbatches, "microbatch")
    _say(console, f"{_counted(run.updates, 'update')} of {microbatches}{by_all}")
    table = _table("", ">tokens", ">FLOPs", ">time")
    flops, step_s = estimate.learner.flops, estimate.learner.step_s
    step_flops = None if flops is None else flops.total
    for name, tokens, work, seconds in (
        ("a step", run.step_tokens, step_flops, step_s),
        (f"{estimate.steps:,} steps", run.run_tokens, run.run_flops, estimate.run_s),
    ):
        times = ("-" if work is None else _count(work), "-" if seconds is None else _time(seconds))
        table.add_row("", name, _count(tokens), *times)
    console.print(table)
    if run.tokens_per_s is not None:
        _say(console, f"{_count(run.tokens_per_s)} tokens/s")
    if flops is not None and flops.held_out > 0.005 * flops.total:
        _say(console, f"{flops.held_out / flops.total:.0%} of the FLOPs measure held-out loss")
    if run.corpus_bytes is not None:
        disk, made = size(run.corpus_bytes), _time(run.corpus_s)
        _say(console, f"a corpus of as many tokens has {disk}, and is made in {made} before that")
    if run.drawn_bytes is not None:
        _say(console, f"version 0 is drawn in {size(run.drawn_bytes)} of the trunk's main memory")
    every = "every step" if run.publish_every == 1 else f"every {run.publish_every:,} steps"
    _say(console, f"a version {every}, {run.versions:,} in all")
    if run.publish_s and step_s and run.publish_s > run.publish_every * step_s:
        note = f"publishing one takes {_time(run.publish_s)}: raise algorithm.publish_every"
        _say(console, note, "yellow")


def _counted(number: int, noun: str) -> str:
    """Like 1 update or 12 microbatches."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _lane(intervals: Sequence[Interval], members: int, seconds: float, width: int) -> str:
    """A column for each stretch of the step, as high as the share of the role that works in it."""
    cell = seconds / width
    lane = ""
    for column in range(width):
        start, end = column * cell, (column + 1) * cell
        busy = sum(max(0.0, min(i.end, end) - max(i.start, start)) for i in intervals)
        share = min(1.0, busy / (cell * members)) if cell else 0.0
        lane += _LEVELS[round(share * (len(_LEVELS) - 1))]
    return lane


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """Join overlapping intervals: the broadcast works while any of its links works."""
    joined: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: i.start):
        start = max(interval.start, joined[-1].end) if joined else interval.start
        if interval.end > start:
            joined.append(replace(interval, start=start))
    return joined


def _count(value: float) -> str:
    """Like 866 k or 32.8 G."""
    units = ["", " k", " M", " G", " T", " P", " E", " Z"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000.0, units[1:]
    return f"{value:.3g}{units[0]}"


def _amount(value: float, unit: str) -> str:
    """Like 590 Mbit/s, 3.35 TB/s, 989 TFLOP/s or 6,000 tokens."""
    if unit == "bytes/s":
        return f"{size(value)}/s"
    if unit in ("bits/s", "FLOP/s"):
        return f"{_count(value)}{unit.replace('bits', 'bit')}"
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _time(seconds: float) -> str:
    """Like 0.42 s, 3 min 5 s, 2 h 10 min or 4.2 days."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    return duration(seconds)
