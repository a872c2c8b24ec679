"""Counts the work of a compiled program on one device, from its HLO text.

`compiled.cost_analysis()` counts the body of a loop once, however often it runs, and all layers of
our models are bodies of loops. Here each instruction counts as often as it is executed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "conditional", "call", "partition-id", "replica-id", "optimization-barrier"),
)
"""Instructions that move no data of their own."""


@dataclass(frozen=True)
class ArrayType:
    """One array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]
    space: int
    """Memory space: 0 is HBM, 5 the host's memory, others on the chip."""

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype.split("e")[0]) or 0)
        return math.prod(self.shape) * bits // 8


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    result: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, kind: str) -> str:
        """The computation named by an attribute such as `body`, "" where there is none."""
        return _first(rf"\b{kind}=%?([\w.\-]+)", self.attributes)


Computation = Mapping[str, Instruction]
"""Instructions by name, in order."""


@dataclass
class Cost:
    """Cost of one execution of a program on one device."""

    flops: float = 0.0
    """FLOPs of matrix products and convolutions, without those of custom calls."""
    hbm_bytes: float = 0.0
    """Operands and results of each instruction outside fusions that lie in HBM; of a stack from
    which a fusion takes a slice, or into which it writes one, that slice."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Executions by kind."""
    wire_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that a device sends, by kind, if the collective runs as a ring."""
    custom_calls: Counter[str] = field(default_factory=Counter)
    """Executions by target: attention kernels are among them."""
    assumed_loops: dict[str, int] = field(default_factory=dict)
    """Loops whose length depends on data, by the operation they come from, and the length that was
    assumed."""


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header.group(1)] = {}
            entry = header.group(1) if line.startswith("ENTRY") else entry
        elif found := _NAME.match(line):
            current[found.group(2)] = _instruction(line, found)
    return computations, entry


def program_cost(text: str, assumed: Mapping[str, int] | None = None) -> Cost:
    """Counts a compiled program (`compiled.as_text()`).

    Args:
        text: of the module.
        assumed: how often a loop runs whose length depends on data, by a word in the name of the
            operation that it comes from (a `jax.named_scope`); others are counted once.
    """
    computations, entry = parse(text)
    counter = _Counter(computations, assumed or {}, Cost())
    counter.count(entry, 1, fused=False)
    return counter.cost


@dataclass(frozen=True)
class _Counter:
    computations: Mapping[str, Computation]
    assumed: Mapping[str, int]
    cost: Cost

    def count(self, name: str, times: int, *, fused: bool) -> None:
        """Adds a computation that runs so many times."""
        computation, computations, cost = self.computations[name], self.computations, self.cost
        for instruction in computation.values():
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in COLLECTIVES:
                # Fused with the slice that is kept, as TPUs do it, it is a reduce-scatter.
                sliced = fused and any(i.opcode == "dynamic-slice" for i in computation.values())
                kind = "reduce-scatter" if opcode == "all-reduce" and sliced else opcode
                cost.collectives[kind] += times
                cost.wire_bytes[kind] += times * _sent(instruction, kind, computation)
            elif opcode == "dot":
                cost.flops += times * _dot_flops(instruction, computation)
            elif opcode == "convolution":
                cost.flops += times * _convolution_flops(instruction, computation)
            elif opcode == "custom-call":
                target = _first(r'custom_call_target="([^"]*)"', instruction.attributes)
                cost.custom_calls[target] += times
            if not fused and opcode not in _FREE and not instruction.opcode.endswith("-done"):
                cost.hbm_bytes += times * _traffic(instruction, computation, computations)
            if opcode == "while":
                trips = _trips(instruction, computation, computations)
                if trips is None:
                    trips = self._assume(instruction)
                self.count(instruction.called("body"), times * trips, fused=fused)
            elif opcode == "conditional":
                for branch in _branches(instruction):
                    self.count(branch, times, fused=fused)
            elif opcode in ("fusion", "async", "call"):
                callee = instruction.called("calls") or instruction.called("to_apply")
                if callee in computations:
                    self.count(callee, times, fused=fused or opcode == "fusion")

    def _assume(self, loop: Instruction) -> int:
        name = _first(r'op_name="([^"]*)"', loop.attributes) or loop.name
        length = next((times for word, times in self.assumed.items() if word in name), 1)
        self.cost.assumed_loops[name] = length
        return length


def _branches(instruction: Instruction) -> list[str]:
    if names := _first(r"branch_computations=\{([^}]*)\}", instruction.attributes):
        return [name.strip().lstrip("%") for name in names.split(",")]
    both = (instruction.called(f"{value}_computation") for value in ("true", "false"))
    return [name for name in both if name]


def _trips(
    loop: Instruction, outside: Computation, computations: Mapping[str, Computation]
) -> int | None:
    """How often a loop runs: as XLA says, or from where its counter starts, ends and by how much
    it grows; None where that is not plain to see."""
    if known := _first(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known)
    condition = computations[loop.called("condition")]
    body = computations[loop.called("body")]
    before = outside[loop.operands[0]]
    after, compare = _root(body), _root(condition)
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    index = _element(condition[compare.operands[0]])
    if index is None or before.opcode != "tuple" or after.opcode != "tuple":
        return None
    start = _constant(outside, before.operands[index])
    bound = _constant(condition, compare.operands[1])
    if bound is None:  # an element of what goes in, moved out of the loop
        at = _element(condition[compare.operands[1]])
        bound = None if at is None else _constant(outside, before.operands[at])
    grown = _source(body, after.operands[index])
    steps = [_constant(body, operand) for operand in grown.operands if grown.opcode == "add"]
    step = next((step for step in steps if step), None)
    if start is None or bound is None or step is None:
        return None
    return -(-(bound - start) // step)


def _root(computation: Computation) -> Instruction:
    return next(instruction for instruction in computation.values() if instruction.root)


def _element(instruction: Instruction) -> int | None:
    index = _first(r"^,?\s*index=(\d+)", instruction.attributes)
    return int(index) if index else None


def _source(computation: Computation, name: str) -> Instruction:
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    source = _source(computation, name)
    return int(source.attributes) if source.opcode == "constant" else None


def _sent(instruction: Instruction, opcode: str, computation: Computation) -> int:
    """Bytes a device sends in a ring of n: (n - 1) shares of what is gathered or scattered, twice
    that for an all-reduce; all of it for a permutation."""
    held = sum(a.bytes for name in instruction.operands for a in computation[name].result)
    n = _group_size(instruction.attributes)
    return {
        "all-gather": held * (n - 1),
        "reduce-scatter": held * (n - 1) // n,
        "all-reduce": 2 * held * (n - 1) // n,
        "all-to-all": held * (n - 1) // n,
        "collective-permute": held,
    }[opcode]


def _group_size(attributes: str) -> int:
    """Devices of one group, in any of the three ways in which HLO writes groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed.group(1).count(",") + 1
    if iota := _first(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota)
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
        # 'axis', or 'axis':(2)4 where an axis is cut and one part, here of 4, takes part
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "replica_groups=" in attributes:
        raise ValueError(f"replica groups in a form that is not known: {attributes[:200]}")
    return 1  # permutations name pairs, not groups


def _dot_flops(instruction: Instruction, computation: Computation) -> float:
    left = computation[instruction.operands[0]].result[0].shape
    contracted = _first(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    axes = [int(axis) for axis in contracted.split(",") if axis]
    return 2.0 * math.prod(instruction.result[0].shape) * math.prod(left[axis] for axis in axes)


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """2 x outputs x input features x kernel positions that lie on the input and not on padding.

    XLA writes products of matrices for TPUs as convolutions, whose windows stand for batch
    dimensions and slide over padding for the most part.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    inputs, kernel, output = labels.groups()
    left, right = (computation[name].result[0].shape for name in instruction.operands[:2])
    result = instruction.result[0].shape
    window = _window(instruction.attributes)
    flops = 2.0 * result[output.index("b")] * result[output.index("f")] * right[kernel.index("i")]
    for axis in sorted(set(output) - {"b", "f"}):
        size = left[inputs.index(axis)]
        flops *= window.get(int(axis), _Window()).pairs(size, result[output.index(axis)])
    return flops


@dataclass(frozen=True)
class _Window:
    """One spatial dimension of a convolution."""

    size: int = 1
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    """Dilation of the input."""

    def pairs(self, inputs: int, outputs: int) -> int:
        """Pairs of an output and a kernel position that meet an element of the input."""
        last = (inputs - 1) * self.dilation
        return sum(
            0 <= at <= last and at % self.dilation == 0
            for out in range(outputs)
            for at in range(out * self.stride - self.pad, out * self.stride - self.pad + self.size)
        )


def _window(attributes: str) -> dict[int, _Window]:
    fields = dict(part.split("=") for part in _first(r"window=\{([^}]*)\}", attributes).split())
    sizes = fields["size"].split("x") if "size" in fields else []

    def values(name: str, default: str) -> list[int]:
        parts = fields[name].split("x") if name in fields else [default] * len(sizes)
        return [int(part.split("_")[0]) for part in parts]

    columns = values("stride", "1"), values("pad", "0"), values("lhs_dilate", "1")
    return dict(enumerate(map(_Window, map(int, sizes), *columns)))


def _traffic(
    instruction: Instruction, computation: Computation, computations: Mapping[str, Computation]
) -> int:
    """Bytes of HBM that an instruction reads and writes."""
    operands = [_in_hbm(computation[name]) for name in instruction.operands]
    result = _in_hbm(instruction)
    if instruction.opcode == "dynamic-slice":
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    callee = instruction.called("calls")
    if instruction.opcode == "fusion" and callee in computations:
        inner = computations[callee]
        for parameter in (i for i in inner.values() if i.opcode == "parameter"):
            slices = _slices(parameter.name, inner)
            at = int(parameter.attributes)
            if slices is not None and operands[at]:
                if any(i.opcode == "dynamic-update-slice" for i in slices):  # in place
                    result -= min(result, operands[at])
                operands[at] = sum(_slice_bytes(i, inner) for i in slices)
    return sum(operands) + result


def _slices(name: str, inner: Computation) -> list[Instruction] | None:
    """Return what reads or writes slices of a parameter; None where one reads it whole."""
    users = [i for i in inner.values() if name in i.operands]
    sliced: list[Instruction] = []
    for user in users:
        if user.opcode == "bitcast":
            further = _slices(user.name, inner)
            if further is None:
                return None
            sliced += further
        elif user.opcode == "dynamic-slice" or (
            user.opcode == "dynamic-update-slice" and user.operands[0] == name
        ):
            sliced.append(user)
        else:
            return None
    return sliced


def _slice_bytes(instruction: Instruction, inner: Computation) -> int:
    written = instruction.opcode == "dynamic-update-slice"
    part = inner[instruction.operands[1]] if written else instruction
    return sum(array.bytes for array in part.result)


def _in_hbm(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.result if array.space == 0)


def _instruction(line: str, found: re.Match[str]) -> Instruction:
    rest = line[found.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    inside, attributes = rest[:end], rest[end + 1 :]
    # A parameter's number and a constant's value stand where others have operands.
    if opcode in ("parameter", "constant"):
        operands, attributes = (), inside
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    types = tuple(
        ArrayType(dtype, tuple(int(n) for n in dims.split(",") if n), int(space or 0))
        for dtype, dims, space in _ARRAY.findall(result)
    )
    return Instruction(
        found.group(2), opcode, types, operands, attributes, found.group(1) is not None
    )


def _first(pattern: str, text: str) -> str:
    """Return the group of the pattern's first match in the text, "" without a match."""
    found = re.search(pattern, text)
    return found.group(1) if found else ""


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one that `text` begins with."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return at
    return len(text) - 1
