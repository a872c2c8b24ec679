"""Lanes of files: proofs, activations, tables, deltas, shares, and specs that commands read."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import pytest
import yaml
import zstandard
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge import tensors
from bridge.delta import Records, apply_deltas, write_delta
from bridge.delta_file import SUFFIX
from bridge.safetensors_io import SINGLE_NAME
from runspec.core.errors import UserError
from tests.bridge.delta.weights import (
    BF16,
    F32,
    normal,
    nudged,
    packed,
    raw,
    records,
    u32,
    write_weights,
)
from tests.fuzz.bounds import Lane
from tests.fuzz.strategies import changed, damaged
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.schema.spec_files import EXAMPLES, SMALL
from verify.coordinator.machine.verdicts import VerdictMismatch, grade_groups
from verify.formats import submission, verdict
from verify.formats.lease import Lease
from verify.formats.tables import MalformedTable, Schema, _layout
from verify.formats.verdict import CheckResult, RolloutVerdict, decode_verdicts
from verify.proof_commands import (
    MAX_HIDDEN,
    MAX_TOKENS,
    bf16_pieces,
    check_proofs,
    open_activations,
)
from verify.thresholds import BFLOAT16
from verify.toploc import (
    PRIME,
    TOP_K,
    MalformedProof,
    build_proofs,
    parse_proof,
    round_to_bf16,
)
from verify.toploc.statistics import verify_proofs


def equal(found: object, expected: object) -> None:
    assert found == expected


# --- proofs -------------------------------------------------------------------------------------

VALUES = np.random.default_rng(0).normal(size=(37, 16)).astype(np.float32)
BITS = round_to_bf16(VALUES)
PROOFS = build_proofs(BITS)
WORDS = [0, 1, 127, 128, 0x3F80, 0x7F80, 0x7FC0, 0xFF80, PRIME - 1, PRIME, PRIME + 1, 0xFFFF]
HEADER_PIECES = [
    *(b"'descr'", b"'<f4'", b"'|O'", b"[('a', '<f4')]", b"False", b"True", b"'shape': ", b"("),
    *(b"(37, 16)", b"(0, 16)", b"(-1, 16)", b"(1,)", b"()", b"9" * 18, b"(1048577, 1)", b"," * 50),
    *(b"__import__('os')", b"{" * 200, b" " * 300, b"\x00", b"\xff", b"\n", b"0, " * 40, b")"),
    *(b"\x01\0v\0{'", b"\x02\0v\0\0\0", b"\x03\0\xff\xff\xff\xff"),
]


PROOF = damaged(
    [*PROOFS, np.array([PRIME] + [1] * 128, ">u2").tobytes()],
    [word.to_bytes(2, "big") for word in WORDS],
) | st.binary(min_size=257, max_size=259)
ROLLOUT = st.sampled_from([37, 1, 5, 31, 32, 33]).flatmap(
    lambda rows: st.tuples(
        st.just(rows), st.just(build_proofs(BITS[:rows])) | st.lists(PROOF, max_size=3)
    )
)


LINES = b"".join(base64.b64encode(proof) + b"\n" for proof in PROOFS)
_FILE = BytesIO()
np.save(_FILE, VALUES)
ACTIVATIONS = _FILE.getvalue()


def _check_lines(lines: bytes) -> Any:
    """What `python -m verify check` says of lines of base64, accepted or not."""
    with TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "proofs").write_bytes(lines)
        (at / "activations.npy").write_bytes(ACTIVATIONS)
        found = check_proofs(at / "activations.npy", str(at / "proofs"), BFLOAT16)
    assert 0 < len(found.reason) < 500
    return found if found.accepted else None


def _read_activations(data: bytes) -> list[np.ndarray]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "under-test.npy"
        path.write_bytes(data)
        activations = open_activations(path)
        tokens, hidden = activations.shape
        assert 0 < tokens <= MAX_TOKENS and 0 < hidden <= MAX_HIDDEN
        pieces = list(bf16_pieces(activations, place="x"))
        assert sum(len(piece) for piece in pieces) == tokens
        return pieces


# --- tables -------------------------------------------------------------------------------------

MAX_ROWS, MAX_BYTES = 32, 1 << 18
LEASE = Lease("demo", 3, "cd" * 32, "ab" * 32, "near", 0, 1, 1, "ef" * 32, 1.5, 61.5)
COUNTS = st.integers(0, 50) | st.sampled_from([1000, -1, 2**31, 2**40, 2**63 - 1, -(2**63)])
_NUMBERS = [n.to_bytes(4, "little", signed=True) for n in (40, 258, 2**31 - 1, -(2**31), 2**24)]
_PIECES = [
    *(b'"shape":[0]', b'"dtype":"I64"', b"}}", b" ", b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f"),
    *(b"\x80", b"\xc3", b"PAR1", b'"__metadata__":{"format":"x"},', *_NUMBERS),
]


def rollouts() -> list[submission.Rollout]:
    """Two groups of two."""
    return [
        submission.Rollout(
            *("tiny", 1, "ab" * 32, "cd" * 32, "é" if row else "p", row // 2, row % 2, 1),
            prompt_tokens=np.arange(3 + row // 2, dtype=np.int32),
            output_tokens=np.full(40, 4, np.int32),
            logprobs=np.full(40, -0.5, np.float32),
            finish_reason="stop",
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            target=None if row else 8,
            task_reward=1.0,
            length_penalty=-0.5,
            proofs=[bytes([row]) * 258] * 2,
            versions=None if row else np.full(40, 1, np.int32),
            turns=None if row else np.array([30, 10], np.int32),
        )
        for row in range(4)
    ]


def verdicts() -> list[RolloutVerdict]:
    """On one group of two, of which the second was not recomputed."""
    checks = [CheckResult("logprobs", True, 0.25, 0.5), CheckResult("proofs", False, 9.0, 0.5, "é")]
    first = RolloutVerdict(
        *("ab" * 32, 0, 0, 1.0, -0.5, 0.5, 40, 8, np.full(40, -0.5, np.float32), 0.125, checks),
        fingerprints=[7, -(2**63), 2**63 - 1, 7],
        gap_excess=0.5,
        between=np.arange(4, dtype=np.int32),
        between_lengths=np.array([4], np.int32),
    )
    unknown = {"target": None, "logprobs": None, "logprob_diff": None, "gap_excess": None}
    unknown |= {"between": None, "between_lengths": None}
    return [first, replace(first, row=1, checks=[], fingerprints=[], **unknown)]


@dataclass(frozen=True)
class Kind:
    """A kind of table, sound rows of it, and its reader and writer."""

    schema: Schema
    rows: Sequence[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], list[Any]]

    @property
    def file(self) -> bytes:
        return self.encode(self.rows)


SUBMISSION = Kind(
    submission.SCHEMA,
    rollouts(),
    submission.encode_rollouts,
    lambda data: submission.decode_rollouts(data, max_rows=MAX_ROWS, max_bytes=MAX_BYTES),
)
VERDICT = Kind(verdict.SCHEMA, verdicts(), verdict.encode_verdicts, decode_verdicts)
KINDS = {"submission": SUBMISSION, "verdict": VERDICT}


def check_rows(kind: Kind, rows: list[Any]) -> None:
    """Every field is of the sound rows' types, and rows that are written again are the same."""
    for row in rows:
        for name, value in vars(row).items():
            sound = [getattr(each, name) for each in kind.rows]
            assert type(value) in map(type, sound), name
            if isinstance(value, np.ndarray):
                dtypes = {each.dtype for each in sound if each is not None}
                assert value.ndim == 1 and value.dtype in dtypes
        if isinstance(row, submission.Rollout):
            assert all(type(proof) is bytes and len(proof) == 258 for proof in row.proofs)
        else:
            assert len(row.checks) <= verdict.MAX_CHECKS
            assert len(row.fingerprints) <= verdict.MAX_FINGERPRINTS
            assert all(type(f) is int and -(2**63) <= f < 2**63 for f in row.fingerprints)
            types = {(type(c.passed), type(c.value), type(c.limit)) for c in row.checks}
            assert types <= {(bool, float, float)}
    assert repr(kind.decode(kind.encode(rows))) == repr(rows)


def _made_up(kind: Kind, counts: list[int], body: bytes, more: int) -> bytes:
    """A header that follows from some counts, and something behind it."""
    layout = _layout(kind.schema, counts)
    size = min(max(end for _, end in layout.tensors.values()), MAX_BYTES) - len(layout.head)
    sent = np.array(counts, "<i8").tobytes()
    rest = max(0, size - len(sent))
    return layout.head + sent + (body * (rest // len(body) + 1))[:rest] + bytes(more)


def tables(kind: Kind, *, made_up: bool = False) -> SearchStrategy[bytes]:
    """Files with damage anywhere, other numbers behind a sound header, or a header of counts."""
    start = 8 + int.from_bytes(kind.file[:8], "little")
    head, body = kind.file[:start], kind.file[start:]
    found = damaged([kind.file], _PIECES) | damaged([body], _NUMBERS).map(lambda b: head + b)
    if not made_up:
        return found
    return found | st.builds(
        _made_up,
        st.just(kind),
        st.lists(COUNTS, min_size=kind.schema.counts, max_size=kind.schema.counts),
        st.sampled_from([b"\0", b"\0\0\0\0\1\0\0\0"]) | st.binary(min_size=1, max_size=64),
        st.sampled_from([0, 1, 8]),
    )


def _graded(given: tuple[bytes, list[int], bool, bool]) -> Any:
    data, dropped, filtered, whole = given
    rows = decode_verdicts(data)
    if whole:  # the same in groups of two
        rows = [replace(row, group=n // 2, row=n) for n, row in enumerate(rows)]
    return grade_groups(
        rows,
        submission="ab" * 32,
        lease=LEASE,
        group_size=2,
        dropped=dropped,
        filter_by="task" if filtered else None,
    )


# --- deltas and shares --------------------------------------------------------------------------

DELTA_NAME = SINGLE_NAME + SUFFIX
SHAPES = {"a": ((3,), F32), "b": ((700,), BF16), "c": ((2, 150), F32), "d": ((5,), BF16)}
DELTA_PIECES = [
    *(b"", b"\0", b"\x01", b"\x02", b"\x03", b"\xff" * 4, b"\x7f" * 3, b"\0" * 12),
    *(u32(number) for number in (0, 1, 254, 255, 256, 700, 701, 2**16, 2**31, 2**32 - 1)),
    *(zstandard.ZstdCompressor().compress(bytes(size)) for size in (0, 1, 700, 701, 2**22)),
    *(raw(bytes(700)), packed(bytes(700)), packed(bytes(2**22)), b'{"bytes":0}', b"e308", b"-"),
]


@dataclass(frozen=True)
class Step:
    """A valid delta, and the version that it makes of the base."""

    delta: bytes
    records: Records
    weights: bytes


@cache
def _steps() -> tuple[bytes, list[Step]]:
    """Base weights, and deltas of few, many and nearly all elements."""
    rng = np.random.default_rng(0)
    old = {name: normal(rng, shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    steps = []
    with TemporaryDirectory() as folder:
        base = write_weights(Path(folder) / "base", old)
        for share in (0.01, 0.2, 0.95):
            target = write_weights(Path(folder) / f"to-{share}", nudged(rng, old, share))
            write_delta(base, target, target / "delta")
            delta = (target / "delta" / DELTA_NAME).read_bytes()
            steps.append(Step(delta, records(target), (target / SINGLE_NAME).read_bytes()))
        return (base / SINGLE_NAME).read_bytes(), steps


def _apply(given: tuple[int, bytes]) -> bytes:
    """What applying a delta makes of the base; no byte outside the tensors may change."""
    base, steps = _steps()
    with TemporaryDirectory() as folder:
        weights, delta = Path(folder) / "base" / SINGLE_NAME, Path(folder) / "delta" / DELTA_NAME
        for path, data in ((weights, base), (delta, given[1])):
            path.parent.mkdir()
            path.write_bytes(data)
        try:
            apply_deltas(weights.parent, [delta.parent], steps[given[0]].records)
        except UserError as error:
            assert SINGLE_NAME in str(error)
            raise
        finally:
            after = weights.read_bytes()
            start = 8 + int.from_bytes(base[:8], "little")
            assert len(after) == len(base) and after[:start] == base[:start]
        return after


@st.composite
def deltas(draw: DrawFn) -> tuple[int, bytes]:
    """Damage anywhere, or behind the header of a delta that keeps its length."""
    number = draw(st.integers(0, 2))
    sound = _steps()[1][number].delta
    start = sound.rfind(b"}}") + 3
    behind = damaged([sound[start:]], DELTA_PIECES).map(lambda blocks: sound[:start] + blocks)
    of_its_size = behind.map(lambda data: data.ljust(len(sound), b"\0")[: len(sound)])
    return number, draw(of_its_size | damaged([sound], DELTA_PIECES))


LENGTHS = (1, 129, 4096, 4500)
SHARES = {
    (kind, n): tensors.codec(kind).encode(
        np.random.default_rng(n).normal(size=n).astype(np.float32)
    )
    for kind in get_args(tensors.Kind)
    for n in LENGTHS
}
NUMBERS = [np.array([x], "<f4").tobytes() for x in (np.nan, np.inf, -np.inf, 3e38, -1, 1e-45)]
NUMBERS += [np.array([x], "<f2").tobytes() for x in (np.nan, np.inf, 65504)]


SHARE = st.sampled_from(list(SHARES)).flatmap(
    lambda of: st.tuples(st.just(of), damaged([SHARES[of]], NUMBERS))
)
"""Its kind and length, and damaged bytes."""


def _decoded(given: tuple[tuple[tensors.Kind, int], bytes]) -> np.ndarray:
    (kind, n), data = given
    x = tensors.codec(kind).decode(data, n)
    assert x.shape == (n,) and np.isfinite(x).all()
    return x


# --- specs --------------------------------------------------------------------------------------

SPECS = [SMALL, *((EXAMPLES / f"{name}.yaml").read_text() for name in ("base", "fleet"))]
"""Without an error, each of another size of run."""
COMMANDS = [
    *[["lint", "spec.yaml"]] * 8,
    ["lint", "--format", "json", "spec.yaml"],
    ["lint", "--format", "sarif", "--fail-level", "warning", "spec.yaml"],
    ["lint", "spec.yaml", "sound.yaml"],
    ["lint", "--fix", "spec.yaml"],
    ["lint", "sound.yaml", "--placement", "spec.yaml"],
    ["render", "spec.yaml"],
    ["render", "--show-origin", "spec.yaml"],
    ["plan", "--json", "spec.yaml"],
    ["lock", "--check", "spec.yaml"],
    ["diff", "spec.yaml"],
]
YAML_PIECES = [
    *("null", "~", "[]", "{}", "-1", "0", "1e999", "-.inf", ".nan", "010", "0x1F", "12:30", "yes"),
    *("on", "'x'", '"\\u0000"', '"\\ud800"', "${HOME}", "${", "${NOT_SET:?said so}", "${A}${B}"),
    *("&a [*a]", "*nothing", "!!python/object:os.system 1", "!!int 1", "? x", "{a: {b: {c: 1}}}"),
    *("9" * 20, "[{name: x}, {name: x}]", "{x: null}", "{name: 1}", "1e-6", "true", "90m", "0s"),
    *("80GB", "590Mbit/s", "é\u2028", "> folded", "|2", "cpu", "h100-80g", "tpu-v5p", "4x4x4"),
    *("0x0", "hf_" + "A" * 34, "http://user:pw@host:1/", "1" * 70, "\t", "\n---\n", "\n...\n"),
    *("\n%YAML 1.1\n", "\nextends: [spec.yaml]\n", "\nextends: spec.yaml\n", "\n- ", ": "),
    *("\nextends: [../x]\n", "\nkind: Placement\n", "\nversion: runspec/v2\n", "\n<<: *a\n"),
    *("\nsteps: 1\nsteps: 2\n", "\x00", "\ufeff", "# runspec: ignore[]\n", "# runspec: ignore\n"),
    *('# runspec: ignore[no-such] reason="x"\n', '# runspec: ignore[unknown-key] reason="why"\n'),
]
ODD = [[], {}, 2, 3, 7, 10**30, [1], [None], {"name": None}, [{"name": "a"}], {"a": 1}]
SPEC_FILES = damaged(
    [text.encode() for text in SPECS], [piece.encode() for piece in YAML_PIECES]
) | changed([yaml.safe_load(text) for text in SPECS], ODD).map(
    lambda spec: yaml.safe_dump(spec, sort_keys=False).encode("utf-8", "surrogatepass")
)


def _command(given: tuple[bytes, list[str]]) -> str | None:
    """What a command prints of a file, where it exits with 0. No spec reaches the network."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, chdir(folder):
        Path("sound.yaml").write_text(SPECS[1])
        Path("spec.yaml").write_bytes(given[0])
        patch.setenv("HF_HUB_OFFLINE", "1")
        done = runspec(*given[1])
    printed = done.stdout + done.stderr
    assert done.returncode in (0, 1, 2), printed
    assert "Traceback" not in printed
    assert done.returncode == 0 or printed, "a failure says why"
    return None if done.returncode else printed


LANES = [
    Lane(
        "proof",
        st.tuples(PROOF, st.sampled_from((TOP_K, 1, 2, 16, 127))),
        lambda given: parse_proof(given[0], k=given[1]).to_bytes(),
        lambda found, given: equal(found, given[0]),
        (MalformedProof,),
        longest=300,
    ),
    Lane(
        "proofs of a rollout",
        ROLLOUT,
        lambda given: verify_proofs(BITS[: given[0]], given[1]),
        refusals=(MalformedProof,),
        memory=16 << 20,
        longest=300,
    ),
    Lane(
        "proof lines",
        damaged([LINES], [b"\n", b"\r\n", b"=", b" ", b"\0", b"A" * 500, LINES]),
        _check_lines,
        memory=16 << 20,
    ),
    Lane(
        "activations",
        damaged([ACTIVATIONS], HEADER_PIECES)
        | damaged([ACTIVATIONS[:140]], HEADER_PIECES).map(lambda head: head + ACTIVATIONS[140:]),
        _read_activations,
        refusals=(UserError,),
        memory=16 << 20,
        longest=1000,
    ),
    *(
        Lane(
            f"{name} table",
            tables(kind, made_up=True),
            kind.decode,
            lambda rows, data, kind=kind: check_rows(kind, rows),
            (MalformedTable,),
            memory=2 << 20,
            longest=300,
        )
        for name, kind in KINDS.items()
    ),
    Lane(
        "grades",
        st.tuples(
            *(tables(VERDICT), st.lists(st.integers(-1, 3), max_size=2), st.booleans()),
            st.booleans(),
        ),
        _graded,
        refusals=(MalformedTable, VerdictMismatch),
        memory=2 << 20,
    ),
    Lane(
        "delta",
        deltas(),
        _apply,
        lambda after, given: equal(after, _steps()[1][given[0]].weights),
        (UserError,),
        longest=3000,
    ),
    Lane("encoded share", SHARE, _decoded, refusals=(tensors.MalformedShare,), memory=1 << 20),
    Lane(
        "commands on specs", st.tuples(SPEC_FILES, st.sampled_from(COMMANDS)), _command, memory=None
    ),
]
