"""The decoder: the same rows as in this process, whatever becomes of its own."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from runspec.core.errors import UserError
from tests.poison import inflating_pages, slow_pages
from tests.verify.coordinator.deployment import rollouts
from tests.verify.decoder.pretended import BEGIN
from verify.decoder import AGAIN, Decoder, DecoderKilled
from verify.decoder.pack import most_pieces, pack
from verify.decoder.parent import _Child
from verify.decoder.unpack import BadAnswer, unpack
from verify.formats.lease import Lease
from verify.formats.submission import SCHEMA, decode_rollouts
from verify.formats.tables import MalformedTable, encode_table

LEASE = Lease("tiny", 0, "ab" * 32, "cd" * 32, "near", 0, 2, 0, "ef" * 32, 0.0, 1.0)
FILE = rollouts(LEASE, "ab" * 32)
LIMITS = {"max_rows": 8, "max_bytes": 1 << 20}
EXPECTED = repr(decode_rollouts(FILE, **LIMITS))
ROW = {
    **{field.name: None for field in SCHEMA},
    **dict.fromkeys(("run", "worker", "lease", "problem_id", "finish_reason"), "é\x00"),
    **dict.fromkeys(("step", "group", "sample", "version", "top_k"), -(2**31)),
    **dict.fromkeys(("temperature", "top_p", "task_reward", "length_penalty"), float("nan")),
    "prompt_tokens": [],
    "output_tokens": [2**31 - 1, -1],
    "logprobs": [float("-inf")],
    "proofs": [b"", b"\x00", bytes(258)],
}
SOUND = pack(pa.Table.from_pylist([ROW], schema=SCHEMA))


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    decoder = Decoder()
    yield decoder
    decoder.close()


def decoded(decoder: Decoder, data: bytes = FILE) -> str:
    return repr(decoder.decode(data, **LIMITS))


def _no_memory(*_: object) -> None:
    raise MemoryError


def _processor_s(process: int | None) -> float:
    """User and system time of a process, seconds."""
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def test_one_process_reads_file_after_file_as_this_one_does(decoder: Decoder) -> None:
    odd = [
        encode_table([], SCHEMA),
        encode_table([ROW], SCHEMA),
        encode_table([{**ROW, "target": 7, "versions": []}, ROW, {**ROW, "versions": [5]}], SCHEMA),
    ]
    assert decoded(decoder) == EXPECTED
    process = decoder.pid
    for data in odd:
        assert decoded(decoder, data) == repr(decode_rollouts(data, **LIMITS))
    with pytest.raises(MalformedTable, match="not a readable Parquet file"):
        decoded(decoder, FILE[:-9])
    with pytest.raises(MalformedTable, match="3 rows, more than the 2 allowed"):
        decoder.decode(odd[2], max_rows=2, max_bytes=1 << 20)
    with pytest.raises(MalformedTable, match="bytes, more than the 100 allowed"):
        decoder.decode(FILE, max_rows=2, max_bytes=100)
    assert decoder.pid == process


def test_arrays_may_be_written_to_as_those_of_this_process(decoder: Decoder) -> None:
    row = decoder.decode(FILE, **LIMITS)[0]
    row.output_tokens[0] = 9
    assert row.output_tokens[0] == 9 and row.logprobs.dtype == np.float32


def test_too_many_empty_proofs_are_refused_before_they_are_objects(decoder: Decoder) -> None:
    many = encode_table([{**ROW, "proofs": [b""] * (most_pieces(1 << 20) + 1)}], SCHEMA)
    with pytest.raises(MalformedTable, match=r"\d+ proofs in \d+ bytes"):
        decoded(decoder, many)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_has_no_environment_no_files_no_processes_and_few_calls(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    decoder.close()
    decoded(decoder)
    assert decoder.pid is not None
    process = Path("/proc") / str(decoder.pid)
    assert b"secret" not in (process / "environ").read_bytes()
    assert "Seccomp:\t2" in (process / "status").read_text()
    assert {int(f.name) for f in (process / "fd").iterdir()} <= {0, 1, 2, 3, 4}
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        assert resource.prlimit(decoder.pid, kind) == (0, 0)
    assert resource.prlimit(decoder.pid, resource.RLIMIT_AS)[0] < 2 << 30


def test_a_process_that_was_killed_is_replaced(decoder: Decoder) -> None:
    decoded(decoder)
    killed = decoder.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert decoded(decoder) == EXPECTED and decoder.pid != killed


def test_what_all_of_a_group_are_told_is_the_parents_to_answer(decoder: Decoder) -> None:
    """Ctrl-C twice, or a service that is stopped, must not look like two files at which it ends."""
    decoded(decoder)
    process = decoder.pid
    assert process is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process, number)
    assert decoded(decoder) == EXPECTED and decoder.pid == process


INHERITED = """
import os, signal, sys
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
os.execv(sys.executable, [sys.executable, "-m", "verify.decoder", *sys.argv[1:]])
"""


def test_its_limit_of_processor_time_holds_whatever_signals_its_parent_ignores() -> None:
    command = [sys.executable, "-c", INHERITED]
    decoder = Decoder(cpu_s=1, deadline_s=60.0, command=command)
    with pytest.raises(MalformedTable, match="by SIGPROF and then it was ended by SIGPROF"):
        # what the pages come to is allowed here, else it would be refused before it is read
        decoder.decode(inflating_pages(1 << 14, 1 << 24), max_rows=8, max_bytes=1 << 40)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_is_counted_for_each_file_anew() -> None:
    decoder = Decoder(cpu_s=1)
    decoded(decoder)
    process = decoder.pid
    while _processor_s(process) < 2.5:
        assert decoded(decoder) == EXPECTED
    assert decoder.pid == process
    decoder.close()


def test_half_an_answer_is_not_the_answer_to_the_next_file(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded(decoder)
    process = decoder.pid
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(_Child, "_answer", _no_memory)
        decoded(decoder)
    assert decoder.pid is None
    assert decoded(decoder) == EXPECTED and decoder.pid != process


def test_a_process_that_hangs_is_replaced() -> None:
    decoder = Decoder(deadline_s=5.0)
    decoded(decoder)
    stopped = decoder.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    assert decoded(decoder) == EXPECTED and decoder.pid != stopped
    decoder.close()


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("os.abort()", "it was ended by SIGABRT"),
        ("os.kill(os.getpid(), 11)", "it was ended by SIGSEGV"),
        ("sys.exit(7)", "it ended with exit code 7"),
        ("os.close(0); time.sleep(60)", "(in time|it closed a pipe)"),
        ("answer(1, 1 << 60); time.sleep(60)", "it answered nonsense .1152921504606846976 bytes."),
        ("answer(2, 1 << 20); time.sleep(60)", "it answered nonsense .1048576 bytes."),
        ("answer(9, 0); time.sleep(60)", "it answered nonsense .kind 9."),
        ("answer(1, 1000, bytes(10)); time.sleep(60)", "in time"),
        ("answer(1, 4, b'\\xff' * 4); time.sleep(60)", "it answered nonsense .4294967295 rows"),
    ],
)
def test_a_file_at_which_two_processes_fail_is_refused_with_what_they_did(
    then: str, reason: str
) -> None:
    deadline_s = 1.0 if "in time" in reason else 30.0
    decoder = Decoder(deadline_s=deadline_s, command=[sys.executable, "-S", "-c", BEGIN + then])
    with pytest.raises(MalformedTable, match=f"no answer twice: .*{reason}.* and then .*{reason}"):
        decoded(decoder)
    assert decoder.pid is None


def test_a_process_that_something_else_kills_says_nothing_of_the_file() -> None:
    kills = BEGIN + "os.kill(os.getpid(), 9)"
    decoder = Decoder(command=[sys.executable, "-S", "-c", kills])
    with pytest.raises(DecoderKilled, match="killed from outside"):
        decoded(decoder)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([sys.executable, "-c", "raise SystemExit('no module named numpy')"], "no module named nu"),
        ([sys.executable, "-c", "import os; os.write(1, bytes([1]) * 9)"], "nonsense"),
        (["/no/such/python"], "No such file"),
    ],
)
def test_a_process_that_does_not_start_is_the_validators_own_fault(
    command: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=f"does not start: .*{reason}"):
        decoded(Decoder(command=command))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends within"),
        (b"\x09\x00\x00\x00", "9 rows, more than the 8"),
        (b"\x01\x00\x00\x00" + b"\xff" * 99, "a length below 0"),
        (b"\x01\x00\x00\x00\x01\x00\x00\x00\xff", "not UTF-8"),
        (SOUND + b"x", "1 bytes too many"),
        (SOUND[:-5] + b"\x02" + SOUND[-4:], "a flag that is neither"),
    ],
)
def test_an_answer_that_is_none_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadAnswer, match=reason):
        unpack(data, max_rows=8)


def test_what_was_accepted_is_read_by_a_slower_machine_too() -> None:
    """A file may be made to take nearly all the time that a validator's decoder has."""
    # given a sound row that takes seconds, and a machine on which that is too long
    table, limits = slow_pages(2_300_000), {"max_rows": 1, "max_bytes": 1 << 24}
    with closing(Decoder(cpu_s=1)) as decoder, pytest.raises(MalformedTable, match="SIGPROF"):
        decoder.decode(table, **limits)
    # when it is read as what another decoder has read, then it has as many times as long
    with closing(Decoder(cpu_s=1, times=AGAIN)) as decoder:
        (row,) = decoder.decode(table, **limits)
    assert row.output_tokens.tolist() == [7]
