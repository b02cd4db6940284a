"""The manifests of deploy/ fit the published schemas, and what stands in several of them is the same everywhere."""

import functools
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from compose_spec import PyCompose

from tests.prometheus import program
from tests.serving import ROOT
from vllm_gumbel.settings import SamplerSettings

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
#: Schemas of a cluster's API, core and extensions, as scripts/setup unpacks them.
SCHEMAS = Path(sys.prefix) / "schemas"
BUILT = ["base", "overlays/argo-rollouts", "overlays/gateway-api", "overlays/kserve"]


@functools.cache
def built(name):
    """Return the objects that kustomize makes of a folder; the test is skipped where there is no kustomize."""
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("no kustomize, and no kubectl, which has one built in")
    done = subprocess.run([*command, str(KUBERNETES / name)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def published():
    """Return what schemas refer to by name, and the schemas of extensions by group, version and kind."""
    if not SCHEMAS.is_dir():
        pytest.skip(f"no {SCHEMAS}, where scripts/setup puts schemas of Kubernetes objects")
    core = json.loads((SCHEMAS / "core.json").read_text())["$defs"]
    extensions = json.loads(gzip.decompress((SCHEMAS / "__resources-mappings.json.gz").read_bytes()))
    by_kind = {
        tuple(names.get(part, "") for part in ("group", "version", "kind")): schema
        for schemas in extensions.values()
        for schema in schemas
        for names in schema.get("x-kubernetes-group-version-kind", [])
    }
    return core, by_kind


def closed(schema):
    """Return a schema that refuses fields it does not name, as an API server does with strict validation."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "$ref" in schema:
        return closed(published()[0][schema["$ref"].split("/")[-1]])
    made = {key: closed(value) for key, value in schema.items() if key not in ("default", "format", "description")}
    named = schema.get("properties")
    if isinstance(named, dict) and "type" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def schema_of(item):
    """Return the closed schema of an object; of the core, Kubernetes' own is deeper than what a cluster says of it."""
    group, _, version = item["apiVersion"].rpartition("/")
    core, extensions = published()
    name = f"io.k8s.api.{group or 'core'}.{version}.{item['kind']}"
    return closed(core[name] if name in core else extensions[group, version, item["kind"]])


def faults(item):
    """Return what is wrong with an object, as text."""
    validator = jsonschema.Draft202012Validator(schema_of(item))
    return [
        f"{'/'.join(map(str, fault.absolute_path))}: {fault.message[:300]}" for fault in validator.iter_errors(item)
    ]


def named(items, kind, name=None):
    """Return the objects of a kind, those of one name if it is given."""
    return [each for each in items if each["kind"] == kind and name in (None, each["metadata"]["name"])]


def containers(item):
    """Return the containers anywhere in an object."""
    if isinstance(item, list):
        return [found for each in item for found in containers(each)]
    if not isinstance(item, dict):
        return []
    here = item["containers"] if isinstance(item.get("containers"), list) else []
    return here + [found for key, value in item.items() if key != "containers" for found in containers(value)]


def environment(container):
    """Return the variables of a container whose values are given."""
    return {each["name"]: each.get("value") for each in container.get("env", [])}


def settings_named(variables):
    """Return the settings of the sampler that variables set."""
    others = {"GUMBEL_SAMPLER", "GUMBEL_METRICS_DIRECTORY", "GUMBEL_ADMIN_KEY"}
    return {name for name in variables if name.startswith("GUMBEL_")} - others


@pytest.mark.parametrize("name", BUILT)
def test_kubernetes_objects_fit_their_published_schemas(name):
    objects = built(name)
    assert objects
    assert {f"{each['kind']} {each['metadata']['name']}": faults(each) for each in objects if faults(each)} == {}


def test_rules_for_the_prometheus_operator_fit_their_schema():
    printed = subprocess.run([DEPLOY / "prometheus" / "prometheusrule"], capture_output=True, text=True, check=True)
    assert [faults(each) for each in yaml.safe_load_all(printed.stdout)] == [[], []]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "livenesProbe"), {}),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "http"),
        ("Service", ("spec", "ports", 0, "target"), "http"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "intervall"), "15s"),
        ("HTTPRoute", ("spec", "rules", 0, "backendRefs", 0, "wait"), 5),
        ("InferenceService", ("spec", "predictor", "model", "storageURI"), "hf://a/b"),
        ("ServingRuntime", ("spec", "containers", 0, "comand"), []),
        ("Rollout", ("spec", "strategy", "canary", "steps", 0, "setWeight"), "25"),
        ("AnalysisTemplate", ("spec", "metrics", 0, "provider", "job", "spec", "backofLimit"), 8),
    ],
)
def test_misspelt_manifests_do_not_fit(kind, path, value):
    objects = [each for name in BUILT for each in built(name)]
    item = json.loads(json.dumps(named(objects, kind)[0]))
    assert faults(item) == []
    inner = item
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert len(faults(item)) == 1


def test_compose_file_fits_the_specification():
    PyCompose.from_json(json.dumps(COMPOSE)).validate()
    broken = {"services": {"a": {"image": "b:1", "healthcheck": {"intervall": "1s"}}}}
    with pytest.raises(ValueError, match="intervall"):
        PyCompose.from_json(json.dumps(broken))


def test_prometheus_of_compose_reads_its_configuration(tmp_path):
    config = (DEPLOY / "compose" / "prometheus.yml").read_text().replace("/etc/prometheus", str(DEPLOY / "prometheus"))
    (tmp_path / "prometheus.yml").write_text(config)
    checked = subprocess.run(
        [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 rule files found" in checked.stdout


def test_no_image_is_named_without_a_version():
    images = {service["image"] for service in COMPOSE["services"].values()}
    for name in BUILT:
        images |= {container["image"] for container in containers(built(name))}
    images |= set(re.findall(r"^FROM (\S+:\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?(\d+\.\d+[\w.-]*|\$\{VLLM_VERSION\})", image), image
    ours = {image for image in images if image.startswith("vllm-gumbel:")}
    targets = re.findall(r" AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert ours == {f"vllm-gumbel:0.1.0-{target}" for target in targets}


@pytest.mark.parametrize("name", ["base", "overlays/gateway-api", "overlays/argo-rollouts"])
def test_services_and_monitor_select_pods_that_exist(name):
    objects = built(name)
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in named(objects, "Deployment")]
    for each in named(objects, "Deployment"):
        assert each["spec"]["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
    for selector in [
        *(each["spec"]["selector"] for each in named(objects, "Service")),
        *(each["spec"]["selector"]["matchLabels"] for each in named(objects, "PodMonitor")),
        *(each["spec"]["selector"]["matchLabels"] for each in named(objects, "Rollout")),
    ]:
        assert selector
        assert any(selector.items() <= labels.items() for labels in pods), selector


@pytest.mark.parametrize("name", BUILT)
def test_every_port_is_the_one_that_the_server_listens_at(name):
    objects = built(name)
    servers = [each for each in containers(objects) if "ports" in each]
    assert servers
    for server in servers:
        assert [(port["name"], port["containerPort"]) for port in server["ports"]] == [("http", 8000)]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    for service in named(objects, "Service"):
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    for (endpoint,) in (each["spec"]["podMetricsEndpoints"] for each in named(objects, "PodMonitor")):
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_route_and_rollout_name_services_and_deployments_that_exist():
    objects = built("overlays/gateway-api")
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in named(objects, "Service")}
    (route,) = named(objects, "HTTPRoute")
    backends = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    assert [ports[backend["name"]] for backend in backends] == [backend["port"] for backend in backends]
    assert sum(backend["weight"] for backend in backends) == 100

    objects = built("overlays/argo-rollouts")
    (rollout,) = named(objects, "Rollout")
    canary = rollout["spec"]["strategy"]["canary"]
    assert {canary["stableService"], canary["canaryService"]} <= {
        each["metadata"]["name"] for each in named(objects, "Service")
    }
    (deployment,) = named(objects, "Deployment", rollout["spec"]["workloadRef"]["name"])
    assert deployment["spec"]["replicas"] == 0
    used = {t["templateName"] for step in canary["steps"] for t in step.get("analysis", {}).get("templates", [])}
    assert used == {each["metadata"]["name"] for each in named(objects, "AnalysisTemplate")}


@pytest.mark.parametrize(("codes", "answer"), [("0", 0), ("1", 1), ("2", 2), ("3 3 0", 0), ("3 1", 1), ("3 " * 9, 3)])
def test_gates_of_argo_ask_again_only_while_there_is_too_little_traffic(codes, answer, tmp_path):
    (template,) = named(built("overlays/argo-rollouts"), "AnalysisTemplate", "vllm-gumbel-gates")
    (judge,) = containers(template)
    (tmp_path / "codes").write_text(codes.strip().replace(" ", "\n") + "\n")
    take_first = 'code=$(head -n 1 codes); sed -i 1d codes; echo "$@" >>asked; exit $code'
    for name, script in {"vllm-gumbel": take_first, "sleep": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PROMETHEUS": "http://p:9090", "WINDOW": "15m", "SELECTOR": 'job="a"'}
    assert given.keys() - {"PATH"} == environment(judge).keys()
    done = subprocess.run([*judge["command"], *judge["args"]], cwd=tmp_path, env=given, timeout=60)
    assert done.returncode == answer
    asked = (tmp_path / "asked").read_text().splitlines()
    assert set(asked) == {'rollout judge --prometheus http://p:9090 --window 15m --selector job="a"'}
    assert len(asked) == min(8, len(codes.split()))


def test_stable_is_drawn_by_vllm_and_the_canary_by_gumbel():
    fractions = {
        each["spec"]["template"]["metadata"]["labels"]["vllm-gumbel/track"]: environment(containers(each)[0])
        for each in named(built("base"), "Deployment")
    }
    assert {track: variables["GUMBEL_ROLLOUT_FRACTION"] for track, variables in fractions.items()} == {
        "stable": "0",
        "canary": "1",
    }


def test_servers_are_told_the_same_everywhere():
    """Compose, base and KServe: plugins, statistics, folders and user of the image."""
    server = containers(named(built("base"), "Deployment"))[0]
    runtime = containers(named(built("overlays/kserve"), "ServingRuntime"))[0]
    varied = {"GUMBEL_ROLLOUT_FRACTION", "GUMBEL_ADMIN_KEY"}
    told = [
        {name: value for name, value in variables.items() if name not in varied}
        for variables in (COMPOSE["services"]["vllm"]["environment"], environment(server), environment(runtime))
    ]
    assert told[0] == told[1] == told[2]
    assert told[0]["VLLM_NO_USAGE_STATS"] == told[0]["DO_NOT_TRACK"] == "1"
    assert told[0]["VLLM_PLUGINS"] == "vllm_gumbel,vllm_gumbel_rollout"
    known = {f"GUMBEL_{name.upper()}" for name in SamplerSettings.model_fields}
    for variables in (COMPOSE["services"]["vllm"]["environment"], environment(server), environment(runtime)):
        assert settings_named(variables) <= known

    folders = {mount["mountPath"] for mount in server["volumeMounts"]}
    assert folders == {mount["mountPath"] for mount in runtime["volumeMounts"]}
    for name, value in told[0].items():
        if value.startswith("/"):
            assert any(value == folder or value.startswith(f"{folder}/") for folder in folders), name
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert dockerfile.count("install -d -o vllm -g vllm /cache /state /metrics") == 2
    assert set(re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE)) == {COMPOSE["services"]["vllm"]["user"]}


def test_everything_that_can_be_is_read_only_without_rights():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "healthcheck" in service, name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    for name in BUILT:
        for container in containers(built(name)):
            rights = container["securityContext"]
            assert (rights["readOnlyRootFilesystem"], rights["allowPrivilegeEscalation"]) == (True, False)
            assert rights["capabilities"] == {"drop": ["ALL"]}


def test_key_is_nowhere_in_a_manifest():
    assert "GUMBEL_ADMIN_KEY" not in COMPOSE["services"]["vllm"]["environment"]
    assert "vllm.env" in (DEPLOY / "compose" / ".gitignore").read_text().split()
    for name in ("base", "overlays/kserve"):
        keys = [
            each for c in containers(built(name)) for each in c.get("env", []) if each["name"] == "GUMBEL_ADMIN_KEY"
        ]
        assert keys
        for key in keys:
            assert key["valueFrom"]["secretKeyRef"] == {"name": "vllm-gumbel-admin", "key": "key", "optional": True}


def test_gpu_component_changes_image_and_resources(tmp_path):
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "gpu"
    overlay.mkdir()
    kustomization = {"resources": ["../../base"], "components": ["../../components/gpu"]}
    (overlay / "kustomization.yaml").write_text(json.dumps(kustomization))
    objects = built(str(overlay))
    assert [faults(each) for each in objects if faults(each)] == []
    for container in containers(named(objects, "Deployment")):
        assert container["image"] == "vllm-gumbel:0.1.0-gpu"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
