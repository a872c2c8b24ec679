"""Files that are not what they should be, or that end, fill or stall whoever reads them: each is
rejected, without a crash or a byte elsewhere.

Files that crash or stall what reads them are fuzz lanes too (`tests/fuzz`).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from broadcast.manifest import is_object_name
from runspec.core.canonical import canonical_json
from runspec.core.signed import BadSignature, sign_document
from tests.attacks.conftest import refused
from tests.attacks.mortal_validator import VALIDATOR, poison
from tests.fuzz.bounds import bounded
from tests.verify.bench import MODEL, Bench
from tests.verify.coordinator.deployment import RUN, Site, submission
from tests.verify.coordinator.over_http import granted, post, request, status
from tests.verify.small_model import ParityTask, Worker, fixed_key, small_spec
from tests.verify.test_workers_to_batches import DISHONEST, HONEST, SPEC, STEPS, at_work, work
from tests.waiting import eventually
from verify.checks.rows import fingerprints
from verify.coordinator.machine.trust import ATTEMPTS
from verify.coordinator_http import sign_request
from verify.formats.documents import Site as SiteDocument
from verify.formats.documents import SiteFile, open_site, sign_site
from verify.formats.lease import Lease, lease_digest, open_lease
from verify.formats.submission import KIND as SUBMISSION
from verify.formats.submission import (
    SCHEMA,
    Rollout,
    SubmissionEnvelope,
    decode_rollouts,
    open_submission,
    sign_submission,
)
from verify.formats.tables import MalformedTable, _layout
from verify.noise import noise_key

pytestmark = pytest.mark.slow

MAX_BYTES = 1 << 20
PATIENCE_S = 600.0
ELSEWHERE = ["../../x", "/etc/passwd", "a/../../x", "a\\..\\x", "..", "x\0y", "", "%2e%2e%2fx"]
"""What leads out of a folder if it becomes a file's name."""


@pytest.fixture(scope="module")
def honest_table(run_of: Callable[..., Bench]) -> bytes:
    bench = run_of()
    return bench.packed(bench.honest())[1]


def head_of(table: bytes) -> bytes:
    """The header's length and the header."""
    return table[: 8 + int.from_bytes(table[:8], "little")]


def malformed(bench: Bench, table: bytes, words: str) -> None:
    """No reader takes it for a table, and nobody who judges it asks the model."""
    with pytest.raises(MalformedTable, match=words):
        decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)
    lease = bench.lease
    envelope = sign_submission(
        *(table,), run=lease.run, step=lease.step, index=lease.index,
        lease=lease_digest(bench.signed_lease), key=bench.worker_key,
    )  # fmt: skip
    assert refused(bench, envelope, table).startswith("format: ")


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
            (b"runspec submission 2", b"runspec verdict 2"),
            (b'{"__metadata__":', b'{"a":{"b":' * 9000 + b'{"__metadata__":'),
            (b"}}", b"} "),
        ],
        ids=["extra", "float", "wider", "twice", "spaced", "verdict", "nested", "cut"],
    )
    def test_another_header(
        self, bench: Bench, honest_table: bytes, old: bytes, new: bytes
    ) -> None:
        header, body = head_of(honest_table)[8:], honest_table[len(head_of(honest_table)) :]
        assert old in header
        other = header.replace(old, new)
        table = len(other).to_bytes(8, "little") + other + body
        malformed(bench, table, r"the header is not that|a count is|9 rows")

    @pytest.mark.parametrize("rows", [0, 9, 800])
    def test_other_numbers_of_rows(self, bench: Bench, rows: int) -> None:
        many = (bench.honest() * (rows // 8 + 1))[:rows]
        assert refused(bench, *bench.packed(many)).startswith("format: ")

    @pytest.mark.parametrize("field", ["run", "worker", "problem_id", "finish_reason"])
    def test_what_its_words_do_to_a_terminal(self, bench: Bench, field: str) -> None:
        """A reason repeats them: in logs, and to whoever asks why. None forges a line there."""
        words = "\x1b[2J\r\nstep 3: accepted " + "x" * 1000
        rows = [replace(row, **{field: words}) for row in bench.honest()]
        reason = refused(bench, *bench.packed(rows))
        assert reason.isprintable() and "accepted" in reason and len(reason) < 300

    def test_a_file_that_is_no_table(self, bench: Bench) -> None:
        malformed(bench, b"PAR1" * 100, "Parquet file")
        longer = [size.to_bytes(8, "little") + b"{}" * 100 for size in (2**20, 2**40, 2**64 - 1)]
        for data in (b"", b"\0" * 1000, b"\xff" * 1000, b"{}", bytes(7), *longer):
            malformed(bench, data, "^(?!.*Parquet)")


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
        malformed(bench, table, "its counts give")

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
        head = head_of(honest_table)
        start, end = json.loads(head[8:])[tensor]["data_offsets"]
        at = len(head) + (end if entry < 0 else start) + entry * len(data)
        malformed(bench, honest_table[:at] + data + honest_table[at + len(data) :], tensor)


class TestLargeFiles:
    """A table takes no more memory than a few times its bytes, which are bounded."""

    def test_more_bytes_than_an_honest_one_can_have(self, bench: Bench) -> None:
        zeros = np.zeros(1 << 18, np.int32)
        _, table = bench.packed([replace(bench.honest()[0], output_tokens=zeros)])
        malformed(bench, table, "bytes, more than the 1048576 allowed")

    @pytest.mark.parametrize("field", ["problem_id", "prompt_tokens"])
    def test_one_value_again_and_again(self, bench: Bench, field: str) -> None:
        """The file has once what every row holds: it counts once for each."""
        large = "x" * (1 << 19) if field == "problem_id" else np.zeros(1 << 17, np.int32)
        _, table = bench.packed([replace(r, **{field: large}) for r in bench.honest()])
        assert len(table) < MAX_BYTES
        malformed(bench, table, f"{field}.index: 4194304 bytes in all rows")

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
        malformed(bench, table, r"^run\.index: 10000 distinct values of 8$")


class TestDecompressionBomb:
    """Nobody unpacks what a stranger has packed."""

    def test_of_a_request(self, site: Site) -> None:
        """HTTP may say that a body is packed: nobody unpacks it, and its bytes are what counts."""
        key, _ = site.worker()
        plain = canonical_json({"wait": 0, "holding": []})
        for name, packed in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
            for told, code in ((plain, 401), (packed, 400)):
                headers = sign_request(key, run=RUN, method="POST", path="/v1/leases", body=told)
                headers["Content-Encoding"] = name
                sent = {"content": packed, "headers": headers}
                assert request(site, "POST", "/v1/leases", **sent).status_code == code


class TestPathInAFileName:
    """Names from outside that become a file's: digests, or plain names, and nothing else."""

    @pytest.mark.parametrize("name", ELSEWHERE)
    def test_of_documents(self, bench: Bench, name: str) -> None:
        key, coordinator = fixed_key(1), bench.coordinator_key
        good = SubmissionEnvelope(RUN, 0, key.public_hex, 0, "0" * 64, "0" * 64, 1)
        assert open_submission(sign_document(SUBMISSION, asdict(good), key)) == good
        for field in ("digest", "lease"):
            signed = sign_document(SUBMISSION, asdict(replace(good, **{field: name})), key)
            with pytest.raises(BadSignature, match="64 hex characters"):
                open_submission(signed)
        keys = frozenset({coordinator.public_hex})
        for field in ("nonce", "worker", "manifest_digest", "step", "version"):
            lease = asdict(replace(bench.lease, **{field: name}))
            with pytest.raises(BadSignature):
                open_lease(sign_document("lease", lease, coordinator), coordinators=keys)
        # files that a volunteer fetches, in a folder that is named by a stranger's spec
        files = [SiteFile(name, "x", 1, "0" * 64), SiteFile("s", name, 1, "0" * 64)]
        for file in files if name != ELSEWHERE[-1] else []:
            document = sign_site(SiteDocument(RUN, ["http://x"], [file], ""), coordinator)
            with pytest.raises(BadSignature):
                open_site(document, coordinators=keys, run=RUN)
        spec = small_spec().model_dump(mode="json", exclude_unset=True)
        assert type(small_spec()).model_validate(spec).name == "small"
        for make in (
            lambda: type(small_spec()).model_validate(spec | {"name": name}),
            lambda: small_spec(name=name),
        ):
            with pytest.raises(ValidationError):
                make()
        assert is_object_name("model-00001.safetensors") and not is_object_name(name)

    def test_over_the_wire(self, site: Site) -> None:
        key, worker = site.worker()
        envelope, table = submission(*granted(site, worker), key)
        before = everything_below(site.run_dir.parent)
        for name in ELSEWHERE:
            forged = sign_document(
                SUBMISSION, asdict(open_submission(envelope)) | {"digest": name}, key
            )
            answer = post(site, key, "/v1/submissions", table, envelope=forged)
            assert (answer.status_code, "64 hex" in answer.json()["error"]) == (400, True)
            body = canonical_json({"leases": [name]})
            assert post(site, key, "/v1/release", body).status_code == 400
        for path in ("../spec.json", "..%2Fspec.json", "%2e%2e/%2e%2e/keys/coordinator.key"):
            for what in ("data", "submissions"):
                url = f"/v1/{what}/{path}"
                answer = post(site, site.validator, url, b"", method="GET")
                assert answer.status_code in (401, 404) and b"runspec/v1" not in answer.content
        for digest in ("0" * 63, "A" * 64):
            url = f"/v1/submissions/{digest}"
            assert post(site, site.validator, url, b"", method="GET").status_code == 404
        assert everything_below(site.run_dir.parent) == before


def everything_below(folder: Path) -> set[Path]:
    """Files, but for what SQLite keeps beside its database."""
    return {p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("state.db")}


class TestFileThatAllocates:
    """What a file takes to read is a small multiple of its bytes, wherever they lie."""

    @pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "problem_id", "proofs"])
    def test_a_column_that_is_all_of_the_file(self, bench: Bench, field: str) -> None:
        def large(number: int) -> object:
            """A value of half a megabyte, another one for each row."""
            if field == "problem_id":
                return str(number) * (1 << 19)
            return [bytes(258)] * (1 << 11) if field == "proofs" else np.full(1 << 17, number, "i4")

        rows = [replace(row, **{field: large(n)}) for n, row in enumerate(bench.honest())]
        _, table = bench.packed(rows)
        assert len(table) > 4 << 20
        with bounded(3 * len(table)):
            assert len(decode_rollouts(table, max_rows=8, max_bytes=len(table))) == 8


class TestFileThatStalls:
    """What takes long to judge."""

    def test_one_token_without_end(self) -> None:
        """Thousands of equal runs are one run: an output is hashed some times and no more."""
        tokens, logprobs = np.full(32768, 7, np.int32), np.full(32768, -130 / 32768, np.float32)
        assert len(fingerprints(tokens, logprobs)) == 2  # of the whole, and of one run


class PoisonWorker(Worker):
    """Hands in a file that kills validators, once, and honest work after it."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        super().__init__(*arguments)
        self.directory, self.poisoned = directory, 0

    def rollouts(self, signed_lease: bytes, lease: Lease) -> list[Rollout]:
        rows = super().rollouts(signed_lease, lease)
        if not self.poisoned:
            for row in rows:
                path = poison(self.directory, noise_key(lease.seed, row.group, row.sample))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        self.poisoned += 1
        return rows


class TestFileThatKillsValidators:
    """Whatever the fault of ours that it finds: a few processes die, and the run goes on."""

    def test_it_is_set_aside_and_everything_else_is_judged(self, tmp_path: Path) -> None:
        # given an honest worker, and one whose first submission kills validators that prefill it
        site, weights = Site(tmp_path, SPEC), tmp_path / "weights"
        site.sign_roles(VALIDATOR)
        honest = Worker(HONEST, MODEL, SPEC, ParityTask())
        deadly = PoisonWorker(weights, DISHONEST, MODEL, SPEC, ParityTask())
        # when validators are started again as often as they die
        deaths = []
        with at_work(site), ThreadPoolExecutor(2) as pool:
            working = [pool.submit(work, site, worker) for worker in (deadly, honest)]
            eventually(lambda: len([*site.run_dir.glob("rollouts/*/*.safetensors")]) == 2, "both")
            command = [sys.executable, "-m", "tests.attacks.mortal_validator", site.url]
            command += [site.root.public_hex, str(weights)]
            while (code := subprocess.call(command, timeout=PATIENCE_S)) != 0:
                deaths.append(code)
                assert len(deaths) < 10
            assert all(done.result(PATIENCE_S) for done in working)
            told = status(site)
        # then SIGKILL came three times, one file is set aside, and nobody was rejected
        assert set(deaths) == {-9} and len(deaths) >= ATTEMPTS
        assert told["rejected_submissions"] == 0
        (aside,) = told["set_aside"]
        assert aside["worker"] == DISHONEST.public_hex and len(aside["attempts"]) >= ATTEMPTS
        manifests = [site.batch(step) for step in range(STEPS)]
        assert all(manifest.complete for manifest in manifests)
        trained = {group.submission for manifest in manifests for group in manifest.groups}
        assert aside["submission"] not in trained
