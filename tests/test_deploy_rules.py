"""The rules of deploy/prometheus mean what they say: promtool runs them, and every name in deploy/ is a real one."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.prometheus import program
from tests.serving import ROOT
from vllm_gumbel.metrics.catalogue import CATALOGUE

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules"
UNIT_TESTS = sorted((DEPLOY / "prometheus" / "tests").glob("*.yml"))
RUNBOOK = (DEPLOY / "runbook.md").read_text()
#: Files of deploy/ by path, without the quotes' backslashes of JSON.
TEXTS = {
    str(path.relative_to(DEPLOY)): path.read_text().replace('\\"', '"')
    for path in sorted(DEPLOY.rglob("*"))
    if path.is_file()
}
RECORDED_NAME = r"\bvllm_gumbel:\w+(?::\w+)*"
#: What begins as our metrics do, and is none.
NO_METRICS = {"vllm_gumbel_rollout"}
#: Labels that Prometheus gives to what it scrapes.
TARGET_LABELS = {"namespace", "job", "instance", "pod"}


def rules(name):
    """Return the rules of a file."""
    return [rule for group in yaml.safe_load((RULES / name).read_text())["groups"] for rule in group["rules"]]


def labels_by_sample_name():
    """Return the labels of every name that a sample of the catalogue's metrics has on `/metrics`."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    return {
        metric.exposed_name + suffix: {*metric.label_names, *(["le"] if suffix == "_bucket" else [])}
        for metric in CATALOGUE
        for suffix in suffixes.get(metric.kind, ("",))
    }


def unit_tests(kind):
    """Return the cases of one kind of all unit tests."""
    tests = [test for path in UNIT_TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    return [case for test in tests for case in test.get(kind, [])]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
RECORDED = {rule["record"] for rule in rules("recording.yml")}
SAMPLES = labels_by_sample_name()


def promtool(*arguments):
    """Run promtool; its output is shown if it fails."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules():
    found = promtool("check", "rules", *map(str, sorted(RULES.glob("*.yml"))))
    assert [int(count) for count in re.findall(r"(\d+) rules found", found)] == [
        len(rules("alerts.yml")),
        len(rules("recording.yml")),
    ]


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.name)
def test_rules_pass_their_unit_tests(path):
    assert "SUCCESS" in promtool("test", "rules", str(path))


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_seen_silent_and_firing(alert):
    cases = [case for case in unit_tests("alert_rule_test") if case["alertname"] == alert]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


@pytest.mark.parametrize("record", sorted(RECORDED))
def test_every_recording_rule_has_a_value_worked_out_by_hand(record):
    asked = [set(re.findall(RECORDED_NAME, case["expr"])) for case in unit_tests("promql_expr_test")]
    assert {record} in asked


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_says_what_to_do(alert):
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "{{ $" in rule["annotations"]["description"]
    assert rule["annotations"]["runbook_url"] == f"deploy/runbook.md#{alert.lower()}"


def test_runbook_has_a_section_for_each_alert_and_for_nothing_else():
    assert re.findall(r"^## (VllmGumbel\w+)$", RUNBOOK, re.MULTILINE) == list(ALERTS)
    for section in RUNBOOK.split("\n## ")[1:]:
        for part in ("**Means**", "**Look at**", "**Do**"):
            assert part in section, section.splitlines()[0]


@pytest.mark.parametrize("path", TEXTS)
def test_every_metric_named_is_one_of_the_catalogue(path):
    named = set(re.findall(r"\bvllm_gumbel_\w+", TEXTS[path])) - NO_METRICS
    assert named - SAMPLES.keys() == set()
    assert set(re.findall(RECORDED_NAME, TEXTS[path])) - RECORDED == set()


@pytest.mark.parametrize("path", TEXTS)
def test_every_label_asked_for_is_one_of_its_metric(path):
    selected = [
        (name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        for name, matchers in re.findall(r"\b(vllm_gumbel_\w+)\{([^{}]*)\}", TEXTS[path])
    ]
    grouped = [
        (name, re.split(r"[\s,]+", labels.strip()))
        for labels, name in re.findall(r"\bby \(([\w,\s]+)\)\s*\((?:\s*\w+\s*\()*\s*(vllm_gumbel_\w+)", TEXTS[path])
    ]
    for name, labels in itertools.chain(selected, grouped):
        assert set(labels) <= SAMPLES[name] | TARGET_LABELS, f"{name}: {labels}"


def test_every_command_named_exists():
    named = {
        found
        for text in TEXTS.values()
        for found in re.findall(r"\bvllm-gumbel (rollout [a-z]+|check|glitch|params|profile|settings|top)\b", text)
    }
    assert {"rollout judge", "rollout off", "check", "top"} <= named
    command = Path(sys.executable).with_name("vllm-gumbel")
    for words in named:
        done = subprocess.run([command, *words.split(), "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_every_metric_of_the_catalogue_is_shown_on_the_dashboard():
    dashboard = TEXTS["grafana/dashboards/vllm-gumbel.json"]
    assert [metric.exposed_name for metric in CATALOGUE if metric.exposed_name not in dashboard] == []


def test_rules_for_the_prometheus_operator_are_the_same_rules():
    printed = subprocess.run([DEPLOY / "prometheus" / "prometheusrule"], capture_output=True, text=True, check=True)
    objects = list(yaml.safe_load_all(printed.stdout))
    assert {each["metadata"]["name"]: each["spec"] for each in objects} == {
        f"vllm-gumbel-{path.stem}": yaml.safe_load(path.read_text()) for path in RULES.glob("*.yml")
    }
