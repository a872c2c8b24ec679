"""Files that are not what they should be: a rejection each, never a crash, never a byte elsewhere.

Files that crash or stall what reads them are fuzz lanes too (`tests/fuzz`).
"""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broadcast.manifest import is_object_name
from runspec.core.canonical import canonical_json
from runspec.core.signed import BadSignature, sign_document
from tests.attacks.setting import refused
from tests.verify.bench import Bench
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from tests.verify.small_model import fixed_key, small_spec
from verify.formats.lease import lease_digest, open_lease
from verify.formats.site import Site as SiteDocument
from verify.formats.site import SiteFile, open_site, sign_site
from verify.formats.submission import KIND as SUBMISSION
from verify.formats.submission import (
    SCHEMA,
    SubmissionEnvelope,
    decode_rollouts,
    open_submission,
    sign_submission,
)
from verify.formats.tables import MalformedTable
from verify.request_auth import ENVELOPE, sign_request

MAX_BYTES = 1 << 20
ELSEWHERE = ["../../x", "/etc/passwd", "a/../../x", "a\\..\\x", "..", "x\0y", "", "%2e%2e%2fx"]
"""What leads out of a folder if it becomes a file's name."""


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


@pytest.fixture(scope="module")
def honest_table(run_of: Callable[..., Bench]) -> bytes:
    bench = run_of()
    return bench.packed(bench.honest())[1]


class TestSchemaTricks:
    """Other columns, types or nesting than the format's, in which a check would look elsewhere."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.append_column("extra", pa.array([0] * len(t))),
            lambda t: t.drop_columns(["proofs"]),
            lambda t: t.select(t.column_names[::-1]),
            lambda t: t.cast(pa.schema([f.with_nullable(True) for f in t.schema])),
            lambda t: t.set_column(
                1, pa.field("step", pa.int64(), nullable=False), t["step"].cast("int64")
            ),
            lambda t: t.rename_columns(["step" if n == "group" else n for n in t.column_names]),
            lambda t: t.set_column(0, SCHEMA.field(0), t["run"].dictionary_encode().cast("string"))
            .append_column("run", t["run"]),
        ],
        ids=["extra", "missing", "reordered", "nullable", "wider", "renamed", "twice"],
    )  # fmt: skip
    def test_another_schema(self, bench: Bench, honest_table: bytes, change) -> None:
        table = parquet(change(pq.read_table(pa.BufferReader(honest_table)).cast(SCHEMA)))
        with pytest.raises(MalformedTable, match="columns are not those"):
            decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
        assert refused(bench, *signed_over(bench, table)).startswith("format: ")

    @pytest.mark.parametrize("rows", [0, 9, 800])
    def test_other_numbers_of_rows(self, bench: Bench, rows: int) -> None:
        table = pq.read_table(pa.BufferReader(bench.packed(bench.honest())[1])).cast(SCHEMA)
        many = pa.concat_tables([table] * (rows // 8 + 1)).slice(0, rows)
        reason = refused(bench, *signed_over(bench, parquet(many)))
        assert reason.startswith("format: ")

    @pytest.mark.parametrize("field", ["run", "worker", "problem_id", "finish_reason"])
    def test_what_its_words_do_to_a_terminal(self, bench: Bench, field: str) -> None:
        """A reason repeats them: in logs, and to whoever asks why. None forges a line there."""
        words = "\x1b[2J\r\nstep 3: accepted " + "x" * 10_000
        rows = [replace(row, **{field: words}) for row in bench.honest()]
        reason = refused(bench, *bench.packed(rows))
        assert reason.isprintable() and "accepted" in reason and len(reason) < 300

    def test_a_file_that_is_no_parquet(self, bench: Bench) -> None:
        for data in (b"", b"PAR1", b"PAR1" * 100, b"\0" * 1000, b'{"rows": []}'):
            assert refused(bench, *signed_over(bench, data)).startswith("format: ")


def signed_over(bench: Bench, table: bytes) -> tuple[bytes, bytes]:
    """An envelope of the worker's over any bytes."""
    lease = bench.lease
    envelope = sign_submission(
        *(table,), run=lease.run, step=lease.step, index=lease.index,
        lease=lease_digest(bench.signed_lease), key=bench.worker_key,
    )  # fmt: skip
    return envelope, table


class TestDecompressionBomb:
    """Millions of numbers in a few kilobytes, refused by the size that they would have."""

    def test_of_zeros(self, bench: Bench) -> None:
        zeros = np.zeros(1 << 20, np.int32)
        _, table = bench.packed([replace(bench.honest()[0], output_tokens=zeros)])
        assert len(table) < MAX_BYTES
        with pytest.raises(MalformedTable, match="decoded, more than the"):
            decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
        assert refused(bench, *signed_over(bench, table)).startswith("format: ")

    @pytest.mark.parametrize("codec", ["zstd", "gzip", "brotli", "snappy", "none"])
    def test_of_one_word_again_and_again(self, bench: Bench, codec: str) -> None:
        """By a dictionary: every row holds the same megabyte, which the file has once."""
        rows = [replace(r, problem_id="x" * (1 << 20)) for r in bench.honest()]
        plain = pq.read_table(pa.BufferReader(bench.packed(rows)[1])).cast(SCHEMA)
        table = parquet(plain, compression=codec, use_dictionary=True)
        with pytest.raises(MalformedTable):
            decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
        assert refused(bench, *signed_over(bench, table)).startswith("format: ")

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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator at work; its origin serves version 0."""
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin(), site.serving():
        yield site


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
