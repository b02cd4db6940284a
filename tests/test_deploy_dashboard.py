"""Every query of the dashboard, put to a real Prometheus that scrapes every metric there is."""

import json
import math
import random
import re

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from tests.metrics_page import BUILD, serving_page
from tests.prometheus import prometheus, scraping
from tests.serving import ROOT
from vllm_gumbel.metrics.catalogue import CATALOGUE, COMMON_LABELS, AnomalyKind
from vllm_gumbel.metrics.evidence import PIT_BINS

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "vllm-gumbel.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
#: A query begins at the margin of a block, and may go on indented.
RUNBOOK_QUERIES = [
    query
    for block in re.findall(r"```promql\n(.*?)```", (DEPLOY / "runbook.md").read_text(), re.DOTALL)
    for query in re.split(r"\n(?=\S)", block.strip())
]
#: Values of the labels beyond the common ones.
LABEL_VALUES = {
    "kind": list(AnomalyKind),
    "bin": [str(bin) for bin in range(PIT_BINS)],
    "result": ["agree", "differ"],
    "reason": ["kernel"],
    "reference": ["default"],
    "part": ["recorder"],
    "key": ["gumbel_salt"],
    **{label: [value] for label, value in BUILD.items()},
}
KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram, "summary": Summary}


class Everything:
    """A page with a series for each arm and label value of every metric of the catalogue."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._children = [child for metric in CATALOGUE for child in self._series(metric)]
        self._random = random.Random(0)

    def _series(self, metric):
        options = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        name = metric.exposed_name.removesuffix("_total")
        parent = KINDS[metric.kind](name, metric.help, metric.label_names, registry=self._registry, **options)
        common = [{"model_name": "m", "engine": "0", "arm": arm} for arm in ("gumbel", "default", "shadow")]
        for labels in common if metric.common else [{}]:
            assert list(labels) == list(COMMON_LABELS if metric.common else ())
            for value in LABEL_VALUES[metric.labels[0]] if metric.labels else [None]:
                first = dict(zip(metric.labels[:1], [value], strict=bool(metric.labels)))
                others = {label: LABEL_VALUES[label][0] for label in metric.labels[1:]}
                yield parent.labels(**labels, **first, **others)

    def grow(self):
        """Count something everywhere; return the page."""
        for child in self._children:
            amount = self._random.uniform(1, 2)
            child.observe(amount) if hasattr(child, "observe") else child.inc(amount)
        return generate_latest(self._registry)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """A Prometheus that has scraped every metric of the catalogue, twice and grown."""
    everything = Everything()
    with serving_page(everything.grow()) as served:
        labelled = scraping(served.url)
        labelled["static_configs"][0]["labels"] = {"namespace": "llm"}
        with prometheus(tmp_path_factory.mktemp("prometheus"), labelled) as running:
            running.wait_for_scrape()
            for _ in range(2):
                served.page = everything.grow()
                running.wait_for_scrape()
            yield running


def filled_in(expression):
    """Return a query as Grafana sends it with everything selected."""
    for variable, value in {"$__rate_interval": "1m", "$model": ".*", "$engine": ".*", "$arm": ".*"}.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression.replace('"0$1"', ""), expression
    return expression


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_of_the_dashboard_returns_series(expression, scraped):
    found = scraped.query(filled_in(expression))
    assert found
    assert all(math.isfinite(value) for _, value in found), found


@pytest.mark.parametrize("query", RUNBOOK_QUERIES)
def test_every_query_of_the_runbook_is_understood(query, scraped):
    """Recorded names have no series here, since this Prometheus has no rules; what is counted has."""
    found = scraped.query(query)
    assert found or re.search(r"\b(vllm_gumbel|vllm):", query)


def test_every_query_of_argos_analysis_is_understood(scraped):
    analysis = DEPLOY / "kubernetes" / "overlays" / "argo-rollouts" / "analysis-rules.yaml"
    spec = yaml.safe_load(analysis.read_text())["spec"]
    queries = {each["name"]: each["provider"]["prometheus"]["query"] for each in spec["metrics"]}
    (selector,) = (argument["value"] for argument in spec["args"] if argument["name"] == "selector")
    for query in queries.values():
        assert scraped.query(query.replace("{{args.selector}}", selector)) == []
    assert scraped.query(queries["breaker"].replace("{{args.selector}}", 'namespace="llm"'))


def test_variables_ask_for_labels_that_exist(scraped):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            series, label = variable["query"]["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            assert all(label in labels for labels, _ in scraped.query(filled_in(series)))
            assert scraped.query(filled_in(series))


def test_panels_fill_the_grid_without_overlap():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_provisioning_finds_dashboard_and_data_source():
    folder = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards" / "vllm-gumbel.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["../grafana/dashboards"] == provider["options"]["path"]
    assert mounts["../grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
