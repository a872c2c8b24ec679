"""Files that are not what they should be: a rejection each, never a crash, never a byte elsewhere.

Files that crash or stall what reads them are fuzz lanes too (`tests/fuzz`).
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broadcast.manifest import is_object_name
from runspec.core.canonical import canonical_json
from runspec.core.signed import BadSignature, sign_document
from tests.attacks.setting import refused
from tests.verify.bench import Bench
from tests.verify.coordinator.deployment import RUN, Site, submission
from tests.verify.small_model import fixed_key, small_spec
from verify.formats.joining import Site as SiteDocument
from verify.formats.joining import SiteFile, open_site, sign_site
from verify.formats.lease import lease_digest, open_lease
from verify.formats.submission import KIND as SUBMISSION
from verify.formats.submission import (
    SCHEMA,
    SubmissionEnvelope,
    decode_rollouts,
    open_submission,
    sign_submission,
)
from verify.formats.tables import MalformedTable, _layout
from verify.request_auth import ENVELOPE, sign_request

MAX_BYTES = 1 << 20
ELSEWHERE = ["../../x", "/etc/passwd", "a/../../x", "a\\..\\x", "..", "x\0y", "", "%2e%2e%2fx"]
"""What leads out of a folder if it becomes a file's name."""


@pytest.fixture(scope="module")
def honest_table(run_of: Callable[..., Bench]) -> bytes:
    bench = run_of()
    return bench.packed(bench.honest())[1]


def head_of(table: bytes) -> bytes:
    """The header's length and the header."""
    return table[: 8 + int.from_bytes(table[:8], "little")]


def with_header(table: bytes, header: bytes) -> bytes:
    """The table behind another header."""
    return len(header).to_bytes(8, "little") + header + table[len(head_of(table)) :]


class TestSchemaTricks:
    """Another header than the format's, by which a reader would look elsewhere: none is parsed."""

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b'"counts":', b'"extra":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"counts":'),
            (b'"step":{"dtype":"I32"', b'"step":{"dtype":"F32"'),
            (b'"step":{"dtype":"I32"', b'"step":{"dtype":"I64"'),
            (b'"step":', b'"group":'),
            (b'"step":', b'"step" :'),
            (b"runspec submission 1", b"runspec verdict 1"),
            (b'{"__metadata__":', b'{"a":{"b":' * 9000 + b'{"__metadata__":'),
            (b"}}", b"} "),
        ],
        ids=["extra", "float", "wider", "twice", "spaced", "verdict", "nested", "cut"],
    )
    def test_another_header(
        self, bench: Bench, honest_table: bytes, old: bytes, new: bytes
    ) -> None:
        header = head_of(honest_table)[8:]
        assert old in header
        table = with_header(honest_table, header.replace(old, new))
        with pytest.raises(MalformedTable, match=r"the header is not that|a count is|9 rows"):
            decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
        assert refused(bench, *signed_over(bench, table)).startswith("format: ")

    @pytest.mark.parametrize("rows", [0, 9, 800])
    def test_other_numbers_of_rows(self, bench: Bench, rows: int) -> None:
        many = (bench.honest() * (rows // 8 + 1))[:rows]
        reason = refused(bench, *bench.packed(many))
        assert reason.startswith("format: ")

    @pytest.mark.parametrize("field", ["run", "worker", "problem_id", "finish_reason"])
    def test_what_its_words_do_to_a_terminal(self, bench: Bench, field: str) -> None:
        """A reason repeats them: in logs, and to whoever asks why. None forges a line there."""
        words = "\x1b[2J\r\nstep 3: accepted " + "x" * 1000
        rows = [replace(row, **{field: words}) for row in bench.honest()]
        reason = refused(bench, *bench.packed(rows))
        assert reason.isprintable() and "accepted" in reason and len(reason) < 300

    def test_a_file_that_is_no_table(self, bench: Bench) -> None:
        longer = [size.to_bytes(8, "little") + b"{}" * 100 for size in (2**20, 2**40, 2**64 - 1)]
        for data in (b"", b"\0" * 1000, b"\xff" * 1000, b"{}", bytes(7), b"PAR1" * 100, *longer):
            reason = refused(bench, *signed_over(bench, data))
            assert reason.startswith("format: ")
            assert ("Parquet file" in reason) == data.startswith(b"PAR1")


def signed_over(bench: Bench, table: bytes) -> tuple[bytes, bytes]:
    """An envelope of the worker's over any bytes."""
    lease = bench.lease
    envelope = sign_submission(
        *(table,), run=lease.run, step=lease.step, index=lease.index,
        lease=lease_digest(bench.signed_lease), key=bench.worker_key,
    )  # fmt: skip
    return envelope, table


class TestLyingCounts:
    """Counts, sizes and offsets that are not those of the bytes that follow."""

    @pytest.mark.parametrize("number", [-1, 0, 7, 9, 2**31, 2**62, 2**63 - 1])
    def test_a_count(self, honest_table: bytes, number: int) -> None:
        for place in range(SCHEMA.counts):
            at = len(head_of(honest_table)) + 8 * place
            count = number.to_bytes(8, "little", signed=True)
            table = honest_table[:at] + count + honest_table[at + 8 :]
            if table != honest_table:
                with pytest.raises(MalformedTable):
                    decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)

    @pytest.mark.parametrize("change", [-1000, -1, 1, 1 << 12])
    def test_bytes_too_few_or_too_many(
        self, bench: Bench, honest_table: bytes, change: int
    ) -> None:
        table = honest_table[:change] if change < 0 else honest_table + bytes(change)
        assert "its counts give" in refused(bench, *signed_over(bench, table))

    @pytest.mark.parametrize(
        ("tensor", "entry", "value"),
        [
            ("target.valid", 0, b"\2"),
            ("run", 0, b"\xff"),
            ("output_tokens.offsets", 0, 1),
            ("output_tokens.offsets", 3, 2**31 - 1),
            ("output_tokens.offsets", 3, -1),
            ("proofs.offsets", -1, 0),
            ("problem_id.text", 1, 0xFFFF),
            ("prompt_tokens.index", 0, -1),
            ("prompt_tokens.index", 0, 2),
            ("run.index", 7, 1),
        ],
    )
    def test_an_entry_that_leads_elsewhere_or_is_none(
        self, bench: Bench, honest_table: bytes, tensor: str, entry: int, value: int | bytes
    ) -> None:
        data = value if isinstance(value, bytes) else np.array(value, "<i4").tobytes()
        table = exchanged(honest_table, tensor, entry, data)
        assert refused(bench, *signed_over(bench, table)).startswith(f"format: {tensor}")


def exchanged(table: bytes, tensor: str, entry: int, value: bytes) -> bytes:
    """The table with another entry in one of its tensors."""
    head = head_of(table)
    start, end = json.loads(head[8:])[tensor]["data_offsets"]
    at = len(head) + (end if entry < 0 else start) + entry * len(value)
    return table[:at] + value + table[at + len(value) :]


class TestLargeFiles:
    """A table takes no more memory than a few times its bytes, which are bounded."""

    def test_more_bytes_than_an_honest_one_can_have(self, bench: Bench) -> None:
        zeros = np.zeros(1 << 18, np.int32)
        _, table = bench.packed([replace(bench.honest()[0], output_tokens=zeros)])
        with pytest.raises(MalformedTable, match="bytes, more than the 1048576 allowed"):
            decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
        assert refused(bench, *signed_over(bench, table)).startswith("format: ")

    @pytest.mark.parametrize("field", ["problem_id", "prompt_tokens"])
    def test_one_value_again_and_again(self, bench: Bench, field: str) -> None:
        """The file has once what every row holds: it counts once for each."""
        large = "x" * (1 << 19) if field == "problem_id" else np.zeros(1 << 17, np.int32)
        _, table = bench.packed([replace(r, **{field: large}) for r in bench.honest()])
        assert len(table) < MAX_BYTES
        with pytest.raises(MalformedTable, match=f"{field}.index: 4194304 bytes in all rows"):
            decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
        assert refused(bench, *signed_over(bench, table)).startswith("format: ")

    def test_texts_without_number(self, bench: Bench, honest_table: bytes) -> None:
        """A file has no more distinct texts than entries that name them: each is an object."""
        head = head_of(honest_table)
        counts = np.frombuffer(honest_table, "<i8", SCHEMA.counts, len(head)).tolist()
        found = _layout(SCHEMA, counts).tensors
        parts = {name: honest_table[start:end] for name, (start, end) in found.items()}
        counts[1], size = 10_000, counts[2]  # texts of the column `run`, and their bytes
        parts["run.text"] = np.array([0] + [size] * 10_000, "<i4").tobytes()
        parts["counts"] = np.array(counts, "<i8").tobytes()
        layout = _layout(SCHEMA, counts)
        table = b"".join([layout.head, *(parts[name] for name in layout.tensors)])
        assert refused(bench, *signed_over(bench, table)) == (
            "format: run.index: 10000 distinct values of 8"
        )


class TestDecompressionBomb:
    """Nobody unpacks what a stranger has packed."""

    @pytest.mark.parametrize("packed", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
    def test_of_a_request(self, site: Site, packed: Callable[[bytes], bytes]) -> None:
        """HTTP may say that a body is packed: nobody unpacks it, and its bytes are what counts."""
        key, _ = site.worker()
        plain = canonical_json({"wait": 0, "holding": []})
        for told, sent in ((plain, packed(plain)), (packed(plain), packed(plain))):
            headers = sign_request(key, run=RUN, method="POST", path="/v1/leases", body=told)
            name = "gzip" if packed is gzip.compress else "deflate"
            answer = httpx.post(
                f"{site.url}/v1/leases",
                content=sent,
                headers=headers | {"Content-Encoding": name},
                verify=False,
            )
            assert answer.status_code == (401 if told is plain else 400)


class TestPathInAFileName:
    """Names from outside that become a file's: digests, or plain names, and nothing else."""

    @pytest.mark.parametrize("name", ELSEWHERE)
    def test_of_a_submission_or_a_lease(self, name: str) -> None:
        key = fixed_key(1)
        good = SubmissionEnvelope(RUN, 0, key.public_hex, 0, "0" * 64, "0" * 64, 1)
        assert open_submission(sign_document(SUBMISSION, asdict(good), key)) == good
        for field in ("digest", "lease"):
            signed = sign_document(SUBMISSION, asdict(replace(good, **{field: name})), key)
            with pytest.raises(BadSignature, match="64 hex characters"):
                open_submission(signed)

    @pytest.mark.parametrize("name", ELSEWHERE)
    @pytest.mark.parametrize("field", ["nonce", "worker", "manifest_digest", "step", "version"])
    def test_of_a_lease_that_a_coordinator_signed(
        self, bench: Bench, field: str, name: str
    ) -> None:
        lease = replace(bench.lease, **{field: name})
        signed = sign_document("lease", asdict(lease), bench.coordinator_key)
        with pytest.raises(BadSignature):
            open_lease(signed, coordinators=frozenset({bench.coordinator_key.public_hex}))

    def test_over_the_wire(self, site: Site) -> None:
        key, worker = site.worker()
        data = worker.lease(20.0)
        assert data is not None
        lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
        envelope, table = submission(data, lease, key)
        before = everything_below(site.run_dir.parent)
        for name in ELSEWHERE:
            payload = asdict(open_submission(envelope)) | {"digest": name}
            forged = sign_document(SUBMISSION, payload, key)
            headers = sign_request(key, run=RUN, method="POST", path="/v1/submissions", body=table)
            headers[ENVELOPE] = base64.b64encode(forged).decode()
            answer = httpx.post(
                f"{site.url}/v1/submissions", content=table, headers=headers, verify=False
            )
            assert (answer.status_code, "64 hex" in answer.json()["error"]) == (400, True)
            body = canonical_json({"leases": [name]})
            signed = sign_request(key, run=RUN, method="POST", path="/v1/release", body=body)
            answer = httpx.post(
                f"{site.url}/v1/release", content=body, headers=signed, verify=False
            )
            assert answer.status_code == 400
        assert everything_below(site.run_dir.parent) == before

    @pytest.mark.parametrize(
        "path",
        [
            "../spec.json",
            "..%2Fspec.json",
            "%2e%2e/%2e%2e/keys/coordinator.key",
            "0" * 63,
            "A" * 64,
        ],
    )
    def test_of_what_is_downloaded(self, site: Site, path: str) -> None:
        for what in ("data", "submissions"):
            url = f"/v1/{what}/{path}"
            signed = sign_request(site.validator, run=RUN, method="GET", path=url, body=b"")
            answer = httpx.get(site.url + url, headers=signed, verify=False)
            assert answer.status_code in (401, 404)
            assert b"runspec/v1" not in answer.content

    @pytest.mark.parametrize("name", ELSEWHERE[:-1])
    def test_of_the_files_that_a_volunteer_fetches(self, name: str) -> None:
        key = fixed_key(2)
        for file in (SiteFile("s", name, 1, "0" * 64), SiteFile(name, "x", 1, "0" * 64)):
            document = sign_site(SiteDocument(RUN, ["http://x"], [file], ""), key)
            with pytest.raises(BadSignature):
                open_site(document, coordinators=frozenset({key.public_hex}), run=RUN)

    @pytest.mark.parametrize("name", [*ELSEWHERE, "manifest.json", ".hidden", "a/b"])
    def test_of_the_objects_of_a_weights_version(self, name: str) -> None:
        assert is_object_name("model-00001.safetensors")
        assert not is_object_name(name)

    @pytest.mark.parametrize("name", ELSEWHERE)
    def test_of_runs_and_pools(self, name: str) -> None:
        """A volunteer's folder is named by the run, of a spec that a stranger signed."""
        spec = small_spec().model_dump(mode="json", exclude_unset=True)
        assert type(small_spec()).model_validate(spec).name == "small"
        with pytest.raises(ValidationError):
            type(small_spec()).model_validate(spec | {"name": name})
        with pytest.raises(ValidationError):
            small_spec(name=name)


def everything_below(folder: Path) -> set[Path]:
    """Files, but for what SQLite keeps beside its database."""
    return {p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("state.db")}


class TestDamagedFile:
    """Any bytes of an honest file changed: a malformed table, or rows that are examined."""

    @settings(max_examples=200, deadline=None)
    @given(
        damage=st.lists(
            st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8
        )
    )
    def test_it_is_refused_or_read(
        self, honest_table: bytes, damage: list[tuple[int, int]]
    ) -> None:
        damaged = bytearray(honest_table)
        for place, value in damage:
            damaged[place % len(damaged)] = value
        try:
            rows = decode_rollouts(bytes(damaged), max_rows=8, max_bytes=MAX_BYTES)
        except MalformedTable:
            return
        assert len(rows) <= 8
