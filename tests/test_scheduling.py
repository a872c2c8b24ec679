"""How tests are spread over processes: whole runs in one, the longest first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import scheduling
from tests.harness import ROOT


def scope_of(nodeid: str) -> str:
    return scheduling.FilesAndRuns._split_scope(SimpleNamespace(), nodeid)  # type: ignore[arg-type]


def test_every_file_with_a_cost_is_there_and_so_is_what_starts_runs() -> None:
    named = [*scheduling.costs(), *scheduling.RUNS]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_all_runs_go_to_one_process_all_engines_to_one_and_other_files_where_there_is_room() -> (
    None
):
    runs = [f"{path}::test" for path in ("tests/e2e/a.py", "tests/e2e/b.py", scheduling.RUNS[1])]
    engines = [f"tests/sampler/engine/{name}.py::test" for name in "ab"]
    assert len({scope_of(nodeid) for nodeid in runs}) == 1
    assert len({scope_of(nodeid) for nodeid in engines}) == 1
    assert len({scope_of(nodeid) for nodeid in runs + engines}) == 2
    others = ["tests/verify/a.py::test_one[::]", "tests/verify/a.py::Those::test", "tests/b.py::t"]
    assert [scope_of(nodeid) for nodeid in others] == ["tests/verify/a.py"] * 2 + ["tests/b.py"]


def test_runs_go_first_then_files_by_their_cost_each_in_its_own_order() -> None:
    # given tests of a long file, a run, and a file of no known cost, as pytest has them
    dearest = next(iter(scheduling.costs()))
    nodeids = [
        "tests/a.py::z",
        "tests/a.py::b",
        f"{dearest}::z",
        f"{dearest}::a",
        "tests/e2e/a.py::r",
    ]
    marks: list[str] = []
    items = [SimpleNamespace(nodeid=n, add_marker=lambda _, n=n: marks.append(n)) for n in nodeids]
    # when a process of xdist's has collected them
    scheduling.pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)  # type: ignore[arg-type]
    # then these are the first that may take long
    assert [item.nodeid for item in items] == [nodeids[4], *nodeids[2:4], *nodeids[:2]]
    assert marks == [nodeids[4]]


def test_there_is_one_process_more_than_cores_where_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(scheduling.os, "sched_getaffinity", lambda _: {0, 1})
    for gib, processes in ((64, 3), (14, 2), (2, 1)):
        sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gib * 2**30 // 4096}
        monkeypatch.setattr(scheduling.os, "sysconf", sizes.__getitem__)
        assert scheduling.pytest_xdist_auto_num_workers() == processes
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "7")
    assert scheduling.pytest_xdist_auto_num_workers() is None
