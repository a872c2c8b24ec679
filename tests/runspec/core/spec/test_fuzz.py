"""Whatever is in the file: a spec or findings, never a traceback."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runspec.core.errors import UserError
from runspec.core.spec.findings import format_finding
from tests.runspec.core.spec.spec_files import SMALL, load, small_spec

MENDED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
FRAGMENTS = st.sampled_from(
    ["null", "[]", "{}", "-1", "1e999", ".nan", "'x'", "${HOME}", "${", "&a [*a]", "!!int 1", "? x",
     "{a: {b: {c: 1}}}", "[{name: x}, {name: x}]", "{x: null}", "\t", "#", "\n", ":", "- ",
     "é\u2028"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PATHS = st.sampled_from(
    ["model", "model.shape", "samplers", "samplers.pool", "samplers.pool.sampling", "reward.length",
     "reward.length.targets", "data.sources.words.params", "optimizer.betas", "broadcast.relays",
     "broadcast.relays.eu.upstream", "secrets.t.from", "learner.hardware.topology", "steps"]
)  # fmt: skip


def check(path: Path, *overrides: str) -> None:
    loaded = load(path, *overrides)
    for finding in loaded.findings:
        assert finding.line >= 1
        assert finding.column >= 1
        format_finding(finding)
    assert loaded.spec is not None or loaded.findings


@MENDED
@given(st.integers(0, len(SMALL)), st.integers(0, 30), FRAGMENTS)
def test_a_spec_with_a_hole_and_a_patch(tmp_path: Path, at: int, cut: int, patch: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SMALL[:at] + patch + SMALL[at + cut :], encoding="utf-8")
    check(path)


@MENDED
@given(st.binary(max_size=100))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(data)
    try:
        check(path)
    except UserError as error:
        assert "not UTF-8" in error.thing


@MENDED
@given(PATHS, VALUES | FRAGMENTS)
def test_any_value_at_any_path(tmp_path: Path, path: str, value: object) -> None:
    text = value if isinstance(value, str) else repr(value)
    if "\n" not in text and "\r" not in text:
        check(small_spec(tmp_path), f"{path}={text}")
