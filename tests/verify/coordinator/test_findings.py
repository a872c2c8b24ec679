"""What watchers found: handed over, bounded, kept, served, and weighed by whoever reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from tests.verify.coordinator.over_http import check, post, request, sample
from verify.__main__ import main as verify
from verify.coordinator.authentication import RATES, Rate
from verify.formats import findings
from verify.formats.findings import LIST_PATH, Finding, open_list, sign_finding, weigh

FOUND = Finding(RUN, 0, 1, ["a" * 64, "b" * 64], "equal", "every bit", share=0.5, finished=1.7e9)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A run whose coordinator has signed one step."""
    site = Site(tmp_path, tiny_spec(audit={"states": 1}, checkpoints={"every": 1}))
    site.publish(0)
    with site.origin():
        with site.serving():
            key, worker = site.worker()
            for _ in range(2):
                sample(site, key, worker)
                check(site, site.client(site.validator))
            site.batch(0)
        yield site


def hand_over(site: Site, key: SigningKey, document: bytes) -> httpx.Response:
    return post(site, key, LIST_PATH, document)


def known(site: Site) -> list[findings.Signed]:
    return open_list(request(site, "GET", LIST_PATH).content)


def test_a_finding_is_its_signers_and_of_signed_steps_and_outlives_a_restart(site, capsys):
    key, other = SigningKey.generate(), SigningKey.generate()
    refuted = replace(FOUND, outcome="refuted", line="NOT \x1b[2J")
    with site.serving():
        for sender, document, words in (
            (other, sign_finding(FOUND, key), "another run or key"),
            (key, sign_finding(replace(FOUND, run="x"), key), "another run or key"),
            (key, sign_finding(replace(FOUND, last=2), key), "steps 0 to 1: 1 are signed"),
            (key, sign_finding(replace(FOUND, last=0), key), "1 are signed"),
            (key, b"{}", "finding"),
            (key, sign_finding(replace(FOUND, outcome="good"), key), "outcome"),  # type: ignore[arg-type]
            (key, b" " * (findings.MAX_BYTES + 1), "larger than"),
        ):
            answer = hand_over(site, sender, document)
            assert answer.status_code in (400, 413) and words in answer.text, words
        assert known(site) == []
        # when two watchers hand over, one of them twice
        for signer, finding in ((key, FOUND), (other, FOUND), (key, refuted)):
            assert hand_over(site, signer, sign_finding(finding, signer)).status_code == 202
        assert known(site) == [(refuted, key.public_hex), (FOUND, other.public_hex)]
    # then readers see whom they trust, also after a restart that cut a file short
    (site.run_dir / "findings" / f".tmp-1-0-1-{key.public_hex}.json").write_bytes(b"{")
    with site.serving():
        assert {signer for _, signer in known(site)} == {key.public_hex, other.public_hex}
        assert verify(["findings", site.url]) == 0
        assert verify(["findings", site.url, "--trust", key.public_hex]) == 1
    said = capsys.readouterr().out
    assert "1 steps checked by keys that you trust, 0 more" in said and "\x1b" not in said


def test_there_is_room_for_so_many_and_who_has_most_makes_it(site, monkeypatch):
    monkeypatch.setattr(findings, "MOST", 3)
    monkeypatch.setitem(RATES, ("address", "new key"), Rate(1e-3, 4))
    keys = [SigningKey.generate() for _ in range(5)]
    with site.serving():
        codes = [hand_over(site, key, sign_finding(FOUND, key)).status_code for key in keys]
        # then the oldest have made room, and an address brings so many new keys a day
        assert codes == [202] * 4 + [429]
        assert {signer for _, signer in known(site)} == {key.public_hex for key in keys[1:4]}
    assert len([*(site.run_dir / "findings").iterdir()]) == 3


def test_a_run_that_publishes_no_states_takes_none(tmp_path):
    site, key = Site(tmp_path, tiny_spec()), SigningKey.generate()
    with site.origin(), site.serving():
        assert hand_over(site, key, sign_finding(FOUND, key)).status_code == 404
    for data in (b"", b"[]", b"{}", b'{"findings": 1}', b'{"findings": [1]}'):
        with pytest.raises(findings.BadSignature):
            open_list(data)


STEPS = st.integers(0, 30)
OUTCOMES = st.sampled_from(["equal", "refuted", "failed"])


@given(st.lists(st.tuples(STEPS, STEPS, OUTCOMES, st.sampled_from("ab"))))
def test_steps_count_once_and_those_of_trusted_keys_first(said):
    found, sets = [], {"a": set[int](), "b": set[int]()}
    for first, last, outcome, key in said:
        found.append((replace(FOUND, first=first, last=last, outcome=outcome), key))
        sets[key] |= set(range(first, last) if outcome != "failed" else ())
    checked, more = len(sets["a"]), len(sets["b"] - sets["a"])
    words = f"{checked} steps checked by keys that you trust, {more} more reported by others"
    assert weigh(found, ["a"]) == words
