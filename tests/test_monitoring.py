"""Board, alerts and pages on monitoring name figures that the roles really have, and no others."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bridge.publisher import Published
from broadcast.admission import Metrics
from learner_jax.metrics import GAUGES, Rows
from runspec.core.signed import SigningKey
from runspec.local.prepare import FILE_NAME
from sampler.evaluation.evaluator import Results
from sampler.worker.stores import Meter
from tests.harness import ROOT
from tests.verify.coordinator.deployment import Site, tiny_spec
from verify.client import CoordinatorClient
from verify.coordinator.handlers import islands
from verify.formats.documents import Evaluated, Figure
from verify.validator import Validator

GRAFANA = ROOT / "docs" / "grafana"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGET_LABELS = {"run", "role", "process", "pool", "job", "instance"}
"""Labels that targets.json and Prometheus itself add."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
Labels = dict[str, set[str]]
"""Label names by figure; those of figures without a value are not known."""


def of_text(text: str) -> Labels:
    """The figures of an answer of `/metrics`."""
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):  # when a counter began; nobody needs it
            continue
        for suffix in SUFFIXES.get(family.type, ("",)):
            found[family.name + suffix] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def of(figures: Collector) -> Labels:
    registry = CollectorRegistry()
    registry.register(figures)
    return of_text(generate_latest(registry).decode())


class IslandFigures(Collector):
    """What the coordinator of a run with islands adds."""

    def collect(self) -> Iterator[Any]:
        member = {"name": "a", "offered": True, "committed": 1, "dropped": 0, "bytes": 8}
        yield from islands.metrics({"waiting_for": {}, "committed": 1, "members": [member]})


def coordinator(folder: Path) -> Labels:
    site = Site(folder, tiny_spec())
    site.publish(0)
    with site.origin(), site.serving(), urlopen(f"{site.url}/metrics") as answer:
        return of_text(answer.read().decode()) | of(IslandFigures())


def broadcast(folder: Path) -> Labels:
    metrics = Metrics(folder)
    metrics.report_versions("run", lambda: {0: 1.0})
    metrics.announced("run", 0)
    metrics.behind_since("run", None)
    metrics.answered("chunk", 200)
    metrics.sent("chunk", 1)
    metrics.dropped("idle")
    return of_text(metrics.text().decode())


def learner() -> Labels:
    rows = Rows()
    row = dict.fromkeys(GAUGES, 1.0)
    more = {"tokens": 1, "train_s": 1.0, "waits": {"coordinator": 1.0}, "clip_fraction_low": 0.0}
    rows.trained(row | more)
    return of(rows)


def validator() -> Labels:
    key = SigningKey.generate()
    client = CoordinatorClient("http://127.0.0.1:9", key, run="run", root_public_key=key.public_hex)
    nothing: Any = None
    made = Validator(
        nothing, key, client, nothing, task_set_of=nothing, log=logging.getLogger("test")
    )
    made._rejected["reward"] += 1
    with made.stages.of("rows"):
        pass
    return of(made)


def evaluator() -> Labels:
    results = Results([("held-out", 0)])
    figures = {"mean": Figure(0.5, 0.4, 0.6)}
    results.evaluated(Evaluated("run", "held-out", 1, None, figures, 0, [], 0.0, 1.0, 1.0))
    return of(results)


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    """All figures of all roles, from their own collectors."""
    folder = tmp_path_factory.mktemp("figures")
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    return {
        **of_text(generate_latest(process).decode()),
        **coordinator(folder / "site"),
        **broadcast(folder),
        **of(Published({0})),
        **learner(),
        **validator(),
        **of(Meter()),
        **evaluator(),
    }


@cache
def expressions() -> list[tuple[str, str]]:
    """Every PromQL expression of board and alerts, and where it stands."""
    board = json.loads((GRAFANA / "board.json").read_text())
    found = [
        (f"panel {panel['title']}", target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    variables = board["templating"]["list"]
    for query in (each["query"]["query"] for each in variables if each["type"] == "query"):
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        found.append((f"variable {query}", f"count by ({label}) ({metric})"))
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    return found + [(rule["alert"], rule["expr"]) for group in rules for rule in group["rules"]]


def names_of(text: str) -> Labels:
    """The metrics of an expression, and the labels that it uses of each."""
    found: Labels = {}

    def visit(node: Any, grouped: frozenset[str] = frozenset()) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            matched = {matcher.name for matcher in node.matchers.matchers}
            found.setdefault(node.name, set()).update(matched, grouped)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels = frozenset(node.modifier.labels)
            promql_parser.walk(node.expr, pre_visit=lambda inside: visit(inside, labels))

    parsed = promql_parser.parse(text.replace("$__rate_interval", "5m"))
    promql_parser.walk(parsed, pre_visit=visit)
    return found


@pytest.mark.parametrize(("place", "text"), expressions(), ids=[at for at, _ in expressions()])
def test_an_expression_parses_and_names_figures_that_exist(
    place: str, text: str, exposed: Labels
) -> None:
    used = names_of(text)
    assert used, place
    for name, labels in used.items():
        assert name in exposed or name == "up", place
        assert labels <= exposed.get(name, set()) | TARGET_LABELS, place


def test_the_board_is_one_that_grafana_takes() -> None:
    board = json.loads((GRAFANA / "board.json").read_text())
    panels = board["panels"]
    assert board["uid"] == "runspec" and board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    # then no panel lies on another
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) == 23


def test_each_alert_says_what_is_wrong() -> None:
    for rule in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].startswith("{{ $labels.run }}: ")


def test_the_example_configuration_finds_the_rules_and_a_runs_targets() -> None:
    example = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    assert [(GRAFANA / name).exists() for name in example["rule_files"]] == [True]
    [job] = example["scrape_configs"]
    [found] = job["file_sd_configs"][0]["files"]
    assert (GRAFANA / found).resolve() == ROOT / "runs" / "target-short" / FILE_NAME


def test_every_figure_is_named_by_the_scheme(exposed: Labels) -> None:
    roles = "coordinator|broadcast|learner|publisher|validator|worker|evaluator"
    scheme = re.compile(rf"runspec_({roles})_[a-z][a-z_]*[a-z]|process_[a-z_]+")
    assert [name for name in exposed if not scheme.fullmatch(name)] == []


def test_the_page_lists_every_figure_with_its_labels(exposed: Labels) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    listed: Labels = {}
    for name, labels in re.findall(r"`(runspec_[a-z_]+)(?:\{([a-z_,]+)\})?`", page):
        listed[name] = set(labels.split(",")) - {""}
    histograms = {name.removesuffix("_bucket") for name in exposed if name.endswith("_bucket")}
    ours = {name: labels for name, labels in exposed.items() if name.startswith("runspec_")}
    for histogram in histograms:
        for suffix in SUFFIXES["histogram"]:
            del ours[histogram + suffix]
        ours[histogram] = set()
    assert listed == ours


def test_other_pages_name_figures_that_exist(exposed: Labels) -> None:
    known = exposed.keys() | {name.removesuffix("_bucket") for name in exposed}
    for page in PAGES:
        named = set(re.findall(r"\brunspec_[a-z_]+\b", page.read_text()))
        assert named - known - {"runspec_rl"} == set(), page.name
