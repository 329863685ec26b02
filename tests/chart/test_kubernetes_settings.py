"""An operator's values for Services, networks, scheduling and probes arrive where Kubernetes reads them."""

import base64
import os
import re
import subprocess
import tarfile

import pytest
import yaml
from chart.helm_binaries import ROOT, helms
from chart.rendering import CHART, Render, nested, pod_spec, render, require_valid

VALUES = yaml.safe_load("""
namespaceOverride: models
engine:
  hostNetwork: true
  accelerator:
    preset: hami
    resourceName: huawei.com/Ascend910B4
    extraResources: {huawei.com/Ascend910B4-memory: 16384, rdma/hca: "1", hugepages-2Mi: 4Gi}
  ephemeralStorage: {request: 10GiB, limit: 20GB}
  probes: {readiness: {periodSeconds: 7}, startup: {periodSeconds: 20}}
  lifecycle: {startupTimeoutSeconds: 1801}
  topologySpread: {enabled: true}
  topologySpreadConstraints:
    - {topologyKey: topology.kubernetes.io/zone, maxSkew: 2, whenUnsatisfiable: DoNotSchedule}
    - {topologyKey: rack, maxSkew: 1, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {a: b}}}
gateway:
  discovery: {type: dns}
  probes: {liveness: {failureThreshold: 9, timeoutSeconds: 3}}
  service:
    type: LoadBalancer
    labels: {expose: outside}
    ipFamilyPolicy: PreferDualStack
    ipFamilies: [IPv6, IPv4]
    externalTrafficPolicy: Local
    loadBalancerClass: example.com/lb
    loadBalancerSourceRanges: [10.0.0.0/8, "2001:db8::/32"]
  resources: {requests: {ephemeralStorage: 1GiB}, limits: {ephemeralStorage: 2GiB}}
  ingress:
    enabled: true
    host: a.example
    tlsSecret: a
    hosts: [{host: b.example, path: /llm}, {host: c.example}]
    tls: [{secretName: b, hosts: [b.example, c.example]}]
monitoring:
  podMonitor: {enabled: true, relabelings: [{action: labeldrop, regex: pod}], metricRelabelings: [{action: keep}]}
  serviceMonitor: {enabled: true, metricRelabelings: [{action: drop, regex: x}]}
  alerts: {enabled: true}
  dashboards: {enabled: true, annotations: {grafana_folder: Models}}
""")


@pytest.fixture(scope="module")
def rendered() -> Render:
    return render(values=VALUES)


def test_they_are_valid_on_every_supported_version(rendered: Render):
    for minor in range(30, 37):
        require_valid(rendered, f"1.{minor}")
    old = render(values=VALUES, kubernetes="1.28")
    require_valid(old, "1.28")
    require_valid(old, "1.29")


def test_everything_goes_to_the_namespace_of_the_values(rendered: Render):
    assert {item["metadata"]["namespace"] for item in rendered.objects} == {"models"}
    rest = rendered.text.replace("-spillway", "")
    assert "llm" not in rest.replace("app: vllm", "").replace("vllm", "").replace("/llm", "").replace("fullmatch", "")


def test_engines_on_the_nodes_network(rendered: Render):
    pod = pod_spec(rendered.one("StatefulSet", "engine"))
    plain = pod_spec(render().one("StatefulSet", "engine"))

    assert pod["hostNetwork"] is True and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "hostNetwork" not in plain and "dnsPolicy" not in plain
    chosen = pod_spec(render(values=nested("engine.dnsPolicy", "Default")).one("StatefulSet", "engine"))
    assert chosen["dnsPolicy"] == "Default"


def test_further_resources_are_requested_and_limited(rendered: Render):
    resources = pod_spec(rendered.one("StatefulSet", "engine"))["containers"][0]["resources"]
    devices = {
        "huawei.com/Ascend910B4": 1,
        "huawei.com/Ascend910B4-memory": "16384",
        "rdma/hca": "1",
        "hugepages-2Mi": "4Gi",
    }

    for kind, disk in (("requests", "10240Mi"), ("limits", "19074Mi")):
        assert {name: resources[kind][name] for name in devices} == devices
        assert resources[kind]["ephemeral-storage"] == disk
    gateway = pod_spec(rendered.one("Deployment", "gateway"))["containers"][0]["resources"]
    assert [gateway[kind]["ephemeral-storage"] for kind in ("requests", "limits")] == ["1024Mi", "2048Mi"]


def test_devices_that_resource_claims_allocate():
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}, {"name": "nic", "resourceClaimName": "fast"}]
    engine = {"accelerator": {"preset": "cuda", "fromClaims": True}, "resourceClaims": claims}
    rendered = render(values={"engine": engine}, kubernetes="1.34")
    pod = pod_spec(rendered.one("StatefulSet", "engine"))
    resources = pod["containers"][0]["resources"]

    for version in ("1.31", "1.34", "1.36"):
        require_valid(rendered, version)
    assert pod["resourceClaims"] == claims
    assert resources["claims"] == [{"name": "gpu"}, {"name": "nic"}]
    assert not any("nvidia.com" in name for kind in ("requests", "limits") for name in resources[kind])
    assert "resourceClaims" not in pod_spec(rendered.one("Deployment", "gateway"))
    assert engine_configuration(rendered)["platform"] == "cuda"


def test_a_claim_beside_devices_of_a_plugin():
    claims = [{"name": "nic", "resourceClaimTemplateName": "fast"}]
    values = {"engine": {"accelerator": {"preset": "cuda"}, "resourceClaims": claims}}
    resources = pod_spec(render(values=values).one("StatefulSet", "engine"))["containers"][0]["resources"]

    assert resources["claims"] == [{"name": "nic"}] and resources["limits"]["nvidia.com/gpu"] == 1


def test_what_ascend_needs_beside_its_devices():
    values = yaml.safe_load("""
    engine:
      tensorParallelSize: 2
      hugePages: {amount: 4GiB, pageSize: 1Gi}
      accelerator:
        preset: hami
        memoryMiB: 16384
        driverMounts: true
        npuSmiPath: /usr/local/sbin/npu-smi
        cpuBinding: "off"
        versionCheck: warn
        hccl: {basePort: 50000, devicePorts: 16666-16697, connectTimeoutSeconds: 600, executeTimeoutSeconds: 900,
               bufferMiB: 400}
    """)
    rendered = render(values=values)
    pod = pod_spec(rendered.one("StatefulSet", "engine"))
    container = pod["containers"][0]
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}

    require_valid(rendered, "1.32")
    assert sources["npu-smi"]["hostPath"] == {"path": "/usr/local/sbin/npu-smi", "type": "File"}
    assert mounts["npu-smi"] == "/usr/local/bin/npu-smi"  # where vllm-ascend's PATH finds it
    assert (sources["hugepages"]["emptyDir"], mounts["hugepages"]) == ({"medium": "HugePages-1Gi"}, "/dev/hugepages")
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["hugepages-1Gi"] == "4096Mi"
        assert container["resources"][kind]["huawei.com/Ascend910B3-memory"] == 16384
    assert {name: value for name, value in environment.items() if name.startswith("HCCL_")} == {
        "HCCL_IF_BASE_PORT": "50000",
        "HCCL_NPU_SOCKET_PORT_RANGE": "16666-16697",
        "HCCL_CONNECT_TIMEOUT": "600",
        "HCCL_EXEC_TIMEOUT": "900",
        "HCCL_BUFFSIZE": "400",
    }
    configuration = engine_configuration(rendered)
    assert (configuration["cpuBinding"], configuration["versionCheck"]) == ("off", "warn")


def test_without_them_nothing_of_ascend_is_there():
    pod = pod_spec(render(values=nested("engine.accelerator", {"driverMounts": True, "npuSmiPath": ""})).one(
        "StatefulSet", "engine"
    ))  # fmt: skip
    names = {volume["name"] for volume in pod["volumes"]}

    assert "driver-lib64" in names and not names & {"npu-smi", "hugepages"}
    assert "HCCL_" not in str(pod) and "hugepages" not in str(pod)


@pytest.mark.parametrize(("limit", "binding"), [("9", "off"), ("10", None), (None, None)])
def test_cpus_are_not_bound_where_there_are_too_few(limit, binding):
    values = {"engine": {"tensorParallelSize": 2, "cpu": {"limit": limit}}}

    assert engine_configuration(render(values=values)).get("cpuBinding") == binding


def engine_configuration(rendered: Render) -> dict[str, object]:
    return yaml.safe_load(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"])


def test_spread_constraints_select_these_pods_unless_they_say_otherwise(rendered: Render):
    engine = rendered.one("StatefulSet", "engine")
    own = {"matchLabels": engine["spec"]["selector"]["matchLabels"]}

    spread = pod_spec(engine)["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone", "rack"]
    assert [each["labelSelector"] for each in spread] == [own, own, {"matchLabels": {"a": "b"}}]


def test_probes_are_as_given(rendered: Render):
    engine = pod_spec(rendered.one("StatefulSet", "engine"))["containers"][0]
    gateway = pod_spec(rendered.one("Deployment", "gateway"))["containers"][0]

    assert engine["readinessProbe"]["periodSeconds"] == 7 and engine["readinessProbe"]["failureThreshold"] == 3
    # 1,801 s of loading in looks of 20 s.
    assert (engine["startupProbe"]["periodSeconds"], engine["startupProbe"]["failureThreshold"]) == (20, 91)
    assert (gateway["livenessProbe"]["timeoutSeconds"], gateway["livenessProbe"]["failureThreshold"]) == (3, 9)


def test_the_service_is_as_given(rendered: Render):
    service = rendered.one("Service", "gateway")
    given = {key: value for key, value in VALUES["gateway"]["service"].items() if key not in ("labels", "type")}

    assert given.items() <= service["spec"].items()
    assert service["metadata"]["labels"]["expose"] == "outside"


def test_an_ingress_of_several_names(rendered: Render):
    ingress = rendered.one("Ingress")["spec"]

    rules = [(rule["host"], rule["http"]["paths"][0]["path"]) for rule in ingress["rules"]]
    assert rules == [("a.example", "/"), ("b.example", "/llm"), ("c.example", "/")]
    assert ingress["tls"] == [
        {"secretName": "a", "hosts": ["a.example"]},
        {"secretName": "b", "hosts": ["b.example", "c.example"]},
    ]
    alone = render(values=nested("gateway.ingress", {"enabled": True, "hosts": [{"host": "b.example"}]}))
    assert [rule.get("host") for rule in alone.one("Ingress")["spec"]["rules"]] == ["b.example"]


def test_monitors_and_dashboards_are_as_given(rendered: Render):
    (engines,) = rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    (gateway,) = rendered.one("ServiceMonitor")["spec"]["endpoints"]

    assert engines["relabelings"] == [{"action": "labeldrop", "regex": "pod"}]
    assert engines["metricRelabelings"] == [{"action": "keep"}]
    assert gateway["metricRelabelings"] == [{"action": "drop", "regex": "x"}] and "relabelings" not in gateway
    dashboards = next(item for item in rendered.of_kind("ConfigMap", "monitoring"))
    assert dashboards["metadata"]["annotations"]["grafana_folder"] == "Models"


def test_without_an_address_an_alert_names_its_section(rendered: Render):
    for rule in rendered.one("PrometheusRule")["spec"]["groups"][0]["rules"]:
        assert "runbook_url" not in rule["annotations"]
        assert rule["annotations"]["runbook"].endswith(f"section {rule['alert']}")


def test_engines_found_by_dns_need_no_token(rendered: Render):
    settings = yaml.safe_load(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])
    names = {item["metadata"]["name"] for item in rendered.of_kind("Service", "engine")}

    found = settings["models"][0]["discovery"]["dns"]
    name, _, domain = found["name"].partition(".")
    assert name in names and domain == "models.svc.cluster.local"
    assert (found["port"], found["kvEventsPort"], found["kvReplayPort"]) == (8100, 8200, 8300)
    assert not rendered.of_kind("Role")
    assert pod_spec(rendered.one("Deployment", "gateway"))["automountServiceAccountToken"] is False


def test_a_model_at_zero_is_woken_by_what_the_gateways_count():
    scaling = {"enabled": True, "minReplicas": 0, "trigger": "gateway", "requestsPerReplica": 20}
    rendered = render(values=nested("engine.autoscaling", scaling))
    (trigger,) = rendered.one("ScaledObject")["spec"]["triggers"]
    (model,) = yaml.safe_load(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])["models"]

    assert rendered.one("ScaledObject")["spec"]["minReplicaCount"] == 0
    assert trigger["metadata"]["threshold"] == "20"
    for series in ("spillway_gateway_admission_waiting_requests", "spillway_gateway_in_flight_requests"):
        assert f'(sum({series}{{namespace="llm", model="Qwen3-8B"}}) or vector(0))' in trigger["metadata"]["query"]
    assert model["wakeSeconds"] == 1800


def test_the_chart_introduces_itself():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    readme = subprocess.run([helms()[0].path, "show", "readme", CHART], capture_output=True, text=True, check=True)

    for key in yaml.safe_load((CHART / "values.yaml").read_text()):
        assert f"`{key}`" in readme.stdout, f"README.md does not name {key}"
    assert base64.b64decode(chart["icon"].partition("base64,")[2]).startswith(b"<svg")


def test_a_package_knows_where_it_comes_from(tmp_path):
    subprocess.run(["cp", "-r", ROOT / "Makefile", ROOT / "charts", ROOT / "CHANGELOG.md", tmp_path], check=True)
    command = ["make", "chart", "SOURCE=https://git.example/spillway", f"HELM={helms()[1].path}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=os.environ)
    (package,) = (tmp_path / "build" / "chart").glob("*.tgz")

    with tarfile.open(package) as archive:
        chart = yaml.safe_load(archive.extractfile("spillway/Chart.yaml").read())
        values = yaml.safe_load(archive.extractfile("spillway/values.yaml").read())
    assert (chart["home"], chart["sources"]) == ("https://git.example/spillway", ["https://git.example/spillway"])
    notes = chart["annotations"]
    assert (
        yaml.safe_load(notes["artifacthub.io/links"])[0]["url"] == "https://git.example/spillway/blob/main/CHANGELOG.md"
    )
    assert {image["image"] for image in yaml.safe_load(notes["artifacthub.io/images"])} == images_of_all_platforms()
    entries = yaml.safe_load(notes["artifacthub.io/changes"])
    assert len(entries) == sum(line.startswith("- ") for line in section_of_this_version().splitlines())
    assert {entry["kind"] for entry in entries} <= {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert all(entry["description"].endswith((".", "?")) for entry in entries)
    runbooks = values["monitoring"]["alerts"]["runbookBaseUrl"]
    assert runbooks == "https://git.example/spillway/blob/main/docs/operations.md"


def images_of_all_platforms() -> set[str]:
    found = set()
    for preset in ("mindcluster", "cuda", "cpu"):
        tier = {"accelerator": {"preset": preset}, "offload": {"sharedTier": {"type": "redis"}}}
        rendered = render(values={"engine": tier, "redis": {"enabled": True}})
        found |= set(re.findall(r'^ *image: "(.+)"$', rendered.text, re.M))
    return found


def section_of_this_version() -> str:
    """The entries of CHANGELOG.md that Artifact Hub shows; what was measured is no change."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    (section,) = [text for text in sections if text.startswith(version)] or [
        text for text in sections if text.startswith("Unreleased")
    ]
    return re.sub(r"^### Measured.*?(?=^### |\Z)", "", section, flags=re.M | re.S)


CHANGES = """# Changelog

## Unreleased

### Added
- Not yet. Not here.

## 1.2.3 (2026-11-01)

### Added
- A `setting: "quoted"` with a \\ and 2.5 s,
  on two lines. More of it.
- **Changed:** a word. And more.

### Measured
- 5 % faster.

### Fixed
- Short.
"""


@pytest.mark.parametrize(
    ("version", "entries"),
    [
        (
            "1.2.3",
            [
                {"kind": "added", "description": 'A `setting: "quoted"` with a \\ and 2.5 s, on two lines.'},
                {"kind": "changed", "description": "a word."},
                {"kind": "fixed", "description": "Short."},
            ],
        ),
        ("1.2.4", [{"kind": "added", "description": "Not yet."}]),
    ],
)
def test_changes_of_artifact_hub_are_first_sentences_of_the_changelog(version, entries):
    script = ROOT / "charts" / "changelog_entries.awk"
    command = ["awk", "-v", f"version={version}", "-f", script]
    done = subprocess.run(command, input=CHANGES, capture_output=True, text=True, check=True)

    assert yaml.safe_load(yaml.safe_load(done.stdout)["artifacthub.io/changes"]) == entries
