"""What a stranger sends ends no validator, and blinds no page, status or report.

Each class is a way by which a text, number or file of a stranger reaches someone who did not expect
it: a verdict's reason, the coordinator's status, the page, a file of data, a model's directory.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.model_files import require_published
from learner_jax.corpus import Counts, read_documents
from runspec.cli.evaluate import print_results
from runspec.cli.machines import progress_line
from runspec.core import rows as row_files
from runspec.core.canonical import MAX_DEPTH, MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import open_lock
from runspec.core.models import read_config
from runspec.core.schema.load import SpecFiles
from runspec.core.tokenizer_files import ChatTemplate, tokenizer_of
from runspec.lint.check import check_spec
from runspec.local.apply import SUMMARY_FILE, write_summary
from runspec.local.dashboard.page import PageData, exported_page
from runspec.local.dashboard.rollouts import Rollouts
from runspec.local.dashboard.source import FolderSource
from runspec.local.model_folders import published_version
from tests.attacks.strange import Refusing, judge
from tests.harness import HANG_S
from tests.runspec.cli.published import publish_run
from tests.runspec.local.dashboard.made_run import MadeRun, Page, bytes_tokenizer
from tests.runspec.local.fake_run import small_spec
from tests.verify.bench import lease_for, packed
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import request, status
from tests.verify.test_validator import COORDINATOR, WORKER, sample, serve
from verify.coordinator.handlers.workers import PAGE, SHOWN, Activity, page, scalars, summary
from verify.coordinator.machine.events import WorkerRegistered
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay
from verify.formats.submission import Rollout

pytestmark = pytest.mark.slow

BRACKETS = "[" * 60
HOSTILE = st.text(
    st.sampled_from('[{]}"\\,:\0\x07\x1b\n\u2028\x85é😀a') | st.characters(codec="utf-8")
)
JSON = st.recursive(HOSTILE, lambda inner: st.lists(inner) | st.dictionaries(HOSTILE, inner))
STATUS_BYTES = 1024 * 1024
"""Least limit of those who read a status."""


class TestTextsInSignedDocuments:
    @given(JSON)
    def test_what_can_be_written_can_be_read(self, value: object) -> None:
        data = canonical_json({"value": value})
        assert parse_object(data, max_bytes=len(data))["value"] == value

    @pytest.mark.parametrize("text", ["[" * 1000, '\\"[{' * 100, '"' + "[" * 100, "\\" * 99 + "["])
    def test_brackets_in_strings_are_no_depth(self, text: str) -> None:
        deep: Any = text
        for _ in range(MAX_DEPTH - 1):
            deep = [deep]
        data = canonical_json({"value": deep})
        assert parse_object(data, max_bytes=len(data)) == {"value": deep}
        with pytest.raises(MalformedJson, match="nested deeper"):
            parse_object(canonical_json({"value": [deep]}), max_bytes=len(data) + 2)

    @pytest.mark.parametrize("cut", ['{"a":', '{"a":"', '\\"', '{"a":"b\\'])
    def test_what_is_cut_off_is_refused(self, cut: str) -> None:
        data = cut.encode() + b"[" * 10**5
        with pytest.raises(MalformedJson):
            parse_object(data, max_bytes=len(data))


@pytest.fixture
def coordinator(run_of: Callable[..., Any]) -> Refusing:
    return Refusing(engine=run_of().engine)


@pytest.fixture(scope="module")
def honest() -> tuple[list[Rollout], bytes, bytes, bytes]:
    """Rows, envelope, table and lease."""
    return sample(0)


def changed(honest: tuple[list[Rollout], bytes, bytes, bytes], **fields: object) -> tuple:
    """Envelope, table and lease of the honest rows with other fields."""
    rows, _, _, signed = honest
    _, lease = lease_for(WORKER, COORDINATOR)
    return (*packed([replace(row, **fields) for row in rows], signed, lease, WORKER), signed)


class TestReasonsThatRepeatAStranger:
    """A verdict whose reason the coordinator refuses does not end the validator."""

    def test_every_strange_submission_is_judged_and_shown(
        self, run_of: Callable[..., Any], honest: tuple[list[Rollout], bytes, bytes, bytes]
    ) -> None:
        """`campaigns/hostile_submissions.py` has ten thousand of them."""
        engine, ends = run_of().engine, Counter[str]()

        @settings(max_examples=200)
        @given(st.randoms(use_true_random=False))
        def judged(random: Random) -> None:
            ends[judge(honest[0], engine, random)] += 1

        judged()
        assert len(ends) > 5 and ends["accepted"] > 0  # the draws reach many checks

    def test_a_refused_rejection_is_sent_in_neutral_words(
        self, coordinator: Refusing, honest: tuple[list[Rollout], bytes, bytes, bytes]
    ) -> None:
        # given a coordinator that refuses to read a stranger's words, and an honest submission
        coordinator.refuses = lambda envelope: BRACKETS[:20] in envelope.reason  # type: ignore[method-assign]
        coordinator.offer(*changed(honest, problem_id=BRACKETS))
        coordinator.offer(*sample(1)[1:])
        # when a validator judges both
        validator = serve(coordinator)
        # then the stranger is rejected in words that repeat nothing, and the honest one is judged
        (first, its_rows), (second, _) = coordinator.opened()
        assert (first.accepted, second.accepted, its_rows) == (False, True, [])
        assert "the validator's log has it" in first.reason and "[" not in first.reason
        assert (validator.checked, coordinator.released) == (2, [])

    def test_a_refused_acceptance_is_given_back_and_blames_nobody(
        self, coordinator: Refusing, honest: tuple[list[Rollout], bytes, bytes, bytes]
    ) -> None:
        digest = coordinator.offer(*honest[1:])
        coordinator.offer(*sample(1)[1:])
        coordinator.refuses = lambda envelope: envelope.submission == digest  # type: ignore[method-assign]
        validator = serve(coordinator)
        ((other, _),) = coordinator.opened()
        assert other.accepted and validator.checked == 1
        ((submission, fault),) = coordinator.released
        assert submission == digest and "400" in fault


class TestStatusOfManyWorkers:
    """Its size does not grow with the workers, and what they say of themselves cannot spoil it."""

    def test_ten_thousand_hostile_workers(self) -> None:
        # given workers that say as much and as oddly as they may
        keys = [f"{number:064x}" for number in range(10_000)]
        state = replay(
            Policy.of(tiny_spec()), [WorkerRegistered(0.0, key, "near") for key in reversed(keys)]
        )
        seen, words = Activity(), {"engine": "[" * 900, "host": '"{'}
        for number, key in enumerate(keys):
            seen.registered(key, scalars(words), 1.0)
            seen.heartbeat(key, {"version": number, "text": "😀" * 70}, 1.0)
        # then the summary is small, and has figures of all
        data = canonical_json(summary(state, seen, 2.0))
        found = parse_object(data, max_bytes=STATUS_BYTES)
        assert len(found["workers"]) == SHOWN and found["workers"][0]["info"] == words
        assert (found["crowd"]["registered"], found["crowd"]["alive"]) == (10_000, 10_000)
        # and the pages have every worker once
        listed, after = [], ""
        while after is not None:
            data = canonical_json(page("workers", after, state, seen, 2.0))
            answer = parse_object(data, max_bytes=STATUS_BYTES)
            assert len(answer["workers"]) <= PAGE
            listed += [worker["key"] for worker in answer["workers"]]
            after = answer["next"]
        assert listed == keys

    def test_over_http(self, site: Site) -> None:
        # given a worker with brackets in its words
        key, client = site.worker()
        client.register("near", {"engine": "[" * 900})
        # then everybody reads the status, its own entry, and the list, which is sent once
        assert status(site)["workers"][0]["info"]["engine"] == "[" * 900
        mine = request(site, "GET", f"/v1/workers/{key.public_hex}").json()
        assert "credit 0 tokens" in progress_line(status(site), mine)
        listed = "GET", "/v1/lists/workers"
        first = request(site, *listed)
        assert [worker["key"] for worker in first.json()["workers"]] == [key.public_hex]
        again = request(site, *listed, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        # and nobody else's
        for path in (f"/v1/workers/{'0' * 64}", "/v1/lists/keys", "/v1/workers/x"):
            assert request(site, "GET", path).status_code == 404


class Tokens(MadeRun):
    """A run whose outputs are these tokens; every fifth step is rejected."""

    tokens: list[int]

    def _rollout(self, *args: Any) -> Rollout:
        made = super()._rollout(*args)
        tokens = np.array(self.tokens, np.int32)
        return replace(made, output_tokens=tokens, logprobs=np.zeros(len(tokens), np.float32))


class TestPagesOfWhatStrangersSent:
    @pytest.fixture(autouse=True)
    def _no_deadlines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("runspec.local.apply.MAX_READ_S", HANG_S)
        monkeypatch.setattr("runspec.local.dashboard.page.MAX_DECODING_S", HANG_S)

    def test_tokens_outside_the_vocabulary_are_shown_as_numbers(self, tmp_path: Path) -> None:
        run, said = Tokens(tmp_path), list[str]()
        run.tokens = [-1, 5, 2**31 - 1]
        run.add_steps(5)
        write_summary(run.dir, 1.0, said.append)
        (shown,) = Page((run.dir / "report.html").read_text()).data["runs"]
        pieces = [each["pieces"] for each in shown["details"].values()]
        assert len(pieces) == 40 and said == []
        assert all(each[::2] == ["<-1>", "<2147483647>"] for each in pieces)

    def test_a_report_that_fails_is_one_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, said = MadeRun(tmp_path), list[str]()
        run.add_steps(1)

        def fails(self: PageData, read_s: float) -> None:
            raise OverflowError("out of range")

        monkeypatch.setattr(PageData, "refresh", fails)
        assert write_summary(run.dir, 1.0, said.append) is not None
        assert (run.dir / SUMMARY_FILE).exists() and not (run.dir / "report.html").exists()
        assert len(said) == 1 and "OverflowError: out of range" in said[0]

    def test_the_time_of_a_text_is_linear_in_its_tokens(self) -> None:
        """Bytes that continue a character which never began."""
        rollouts = Rollouts.__new__(Rollouts)
        counting = rollouts._tokenizer = Counting()
        costs = []
        for count in (1000, 2000):
            counting.tokens = 0
            pieces = rollouts._pieces([counting.broken] * count)
            assert len(pieces) == count and set("".join(pieces)) == {"\ufffd"}
            costs.append(counting.tokens)
        assert costs[1] < 2.1 * costs[0] < 100_000

    def test_a_group_that_does_not_fit_is_left_out_alone(self, tmp_path: Path) -> None:
        # given a rejected group that is too large for the page, which rejected ones come first in
        run = MadeRun(tmp_path, say=lambda step, group, n: "x" * (300_000 if step == 4 else 5))
        run.add_steps(6)
        view = PageData(FolderSource(run.dir))
        view.refresh(HANG_S)
        (shown,) = Page(exported_page([view], 1_000_000)).data["runs"]
        _, rollouts = shown["rollouts"]
        # then its eight rollouts are listed without their text, and all others have theirs
        found = len(rollouts["rows"]), len(shown["details"]), rollouts["left_out"]
        assert found == (48, 40, 0)


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self) -> None:
        self._of_bytes, self.tokens = bytes_tokenizer(), 0
        self.broken = self._of_bytes.encode("\x80").ids[1]

    def decode(self, tokens: list[int], **options: bool) -> str:
        self.tokens += len(tokens)
        return self._of_bytes.decode(tokens, **options)

    def id_to_token(self, token: int) -> str | None:
        return self._of_bytes.id_to_token(token)


class TestParquetThatExpands:
    """A few kilobytes name one text again and again."""

    @pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
    def test_a_row_that_expands_is_refused_before_it_is_written_out(
        self, tmp_path: Path, nested: bool
    ) -> None:
        # given 60 rows, the last of 200 MB, and a file of kilobytes
        text = "x" * 10**6
        rows: list[Any] = [[text] * (200 if number == 59 else 1) for number in range(60)]
        path = tmp_path / "bomb.parquet"
        pq.write_table(pa.table({"text": rows if nested else [text] * 60}), path)
        assert path.stat().st_size < 200_000
        most, before = (2 * 10**6, pa.total_allocated_bytes()) if nested else (10**6 - 1, 0)
        # then it is refused by its number, and rows before it can be read one by one
        groups = row_files.parquet_groups(path, ["text"], "p")
        said = "row 60 is 200" if nested else "row 1 is 1000000 bytes"
        with pytest.raises(UserError, match=said):
            for _ in row_files.table_rows(groups, "p", most):
                assert pa.total_allocated_bytes() - before < 10**8
        if not nested:
            assert [each.value for each in read_documents(path, Counts())] == [text] * 60

    def test_rows_come_in_portions_of_bounded_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(row_files, "_TOGETHER_BYTES", 10_000)
        rows = [{"a": "x" * (500 * (n % 9)), "b": [{"c": n, "d": None}] * n} for n in range(50)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p", row_group_size=20)
        portions = [
            portion
            for _, group in row_files.parquet_groups(tmp_path / "p", ["a", "b"], "p")
            for portion in row_files.bounded_rows(group, most=10**6, place="p")
        ]
        assert [row for portion in portions for row in portion] == rows
        assert max(len(portion) for portion in portions) < 10 < len(portions)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one published version."""
    return publish_run(tmp_path_factory.mktemp("published"), 1)


class TestModelsOfStrangers:
    @pytest.mark.parametrize(
        "name",
        [
            "chat_template.jinja",
            "pytorch_model.bin",
            "adapter_config.json",
            ".hidden",
            "sub",
        ],
    )
    def test_a_file_that_the_manifest_does_not_list_is_refused(
        self, run_dir: Path, name: str
    ) -> None:
        found = published_version(run_dir, small_spec("small", 5), 0)
        require_published(found.folder, found.manifest)
        other = found.folder / name
        other.mkdir() if name == "sub" else other.write_text("{}")
        try:
            with pytest.raises(UserError, match=f"'{name}' is none of its files"):
                require_published(found.folder, found.manifest)
        finally:
            other.rmdir() if name == "sub" else other.unlink()

    @pytest.mark.parametrize(
        "change",
        [
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},
            {"model": [[[]]]},
        ],
        ids=["panic-in-charsmap", "merge-without-token", "no-model"],
    )
    def test_a_tokenizer_that_panics_is_a_message(self, change: dict[str, Any]) -> None:
        whole = json.loads(bytes_tokenizer().to_str())
        with pytest.raises(UserError, match="not a tokenizer"):
            tokenizer_of(json.dumps(whole | change).encode(), "here")

    def test_a_config_nested_without_end_is_a_message(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"a":' * 10**5)
        with pytest.raises(UserError, match="cannot read the model's config"):
            read_config(tmp_path)

    @pytest.mark.parametrize("option", ["cls=cycler", "default=raise_exception", "skipkeys=true"])
    def test_a_template_cannot_hand_code_to_json(self, option: str) -> None:
        template = ChatTemplate("{{ messages | tojson(" + option + ") }}", {}, "here")
        with pytest.raises(UserError, match="the chat template fails"):
            template.render([{"role": "user", "content": "a"}])


def test_a_lock_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(0o666)
    before = os.umask(0)
    try:
        for each in (path, tmp_path / "new"):
            os.close(open_lock(each))
            assert each.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("secret", ["ghp_0123456789", "two words: 'x' \\ \"y\"\nend", "é" * 300])
def test_lint_shows_no_value_of_the_environment(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text('name: "${TOKEN}"\nsteps: ${TOKEN}\nmodel: {hf: "${TOKEN}"}\n')
    found = check_spec(SpecFiles(path), environ={"TOKEN": secret}).findings
    shown = "".join(f"{each.message} {each.suggestion}" for each in found)
    assert "${TOKEN}" in shown and secret[:8] not in shown and secret[-5:] not in shown


def test_a_problem_that_overlaps_and_an_answer_are_shown_in_printable_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "\x1b]0;title\x07\n\u202e" + BRACKETS
    found = {"figures": {"mean": [0.0, None, None]}, "count": 1, "faults": 0}
    found["samples"] = [{"reward": 0.0, **dict.fromkeys(("prompt", "output", "reason"), name)}]
    found["samples"][0]["problem_id"] = name
    found["overlap"] = [{"problem_id": name, "trained": name, "exact": True}]
    print_results({"suite": found}, as_json=False)
    lines = [each for each in capsys.readouterr().out.split("\n") if BRACKETS in each]
    assert len(lines) == 4 and all(line.isprintable() for line in lines)
