"""Rights in the cluster, network policies, pod security, and that secrets appear only in Secrets."""

import json

import pytest
from chart.rendering import CHART, EXAMPLES, environment, pod_spec, render

PRODUCTION = CHART / "examples" / "production.yaml"
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def test_the_gateway_may_watch_endpoint_slices_and_nothing_else():
    rendered = render(PRODUCTION)
    role, binding = rendered.one("Role"), rendered.one("RoleBinding")

    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    gateway = pod_spec(rendered.one("Deployment", "gateway"))
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": gateway["serviceAccountName"], "namespace": "llm"}
    ]
    assert gateway["automountServiceAccountToken"] is True
    assert not rendered.of_kind("ClusterRole") and not rendered.of_kind("ClusterRoleBinding")


def test_with_engines_of_a_deployment_it_may_patch_pods_of_its_namespace():
    engines = {"kept": {}, "scaled": {"controller": "Deployment", "model": {"servedName": "scaled"}}}
    rules = render(PRODUCTION, values={"engines": engines}).one("Role")["rules"]

    assert rules[1:] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


def test_nothing_else_has_a_token():
    rendered = render(CHART / "values-cpu.yaml")
    listing = render(CHART / "values-cpu.yaml", values={"gateway": {"discovery": {"type": "static"}}})

    assert not listing.of_kind("Role") and not listing.of_kind("RoleBinding")
    for workload in [*rendered.of_kind("StatefulSet"), *listing.of_kind("Deployment")]:
        assert pod_spec(workload)["automountServiceAccountToken"] is False
    assert all(account["automountServiceAccountToken"] is False for account in rendered.of_kind("ServiceAccount"))


def test_a_role_of_ones_own_is_left_alone():
    account = {"create": False, "name": "own"}
    rendered = render(values={"gateway": {"rbac": {"create": False}, "serviceAccount": account}})

    assert not rendered.of_kind("Role")
    gateway = pod_spec(rendered.one("Deployment", "gateway"))
    assert gateway["serviceAccountName"] == "own" and gateway["automountServiceAccountToken"] is True


def test_pods_without_a_device_are_restricted():
    """Pods meet Kubernetes' restricted Pod Security, and have a read-only root file system on top."""
    rendered = render(CHART / "values-cpu.yaml")
    pods = [pod_spec(item) for kind in ("StatefulSet", "Deployment") for item in rendered.of_kind(kind)]
    pods += [rendered.one("Pod", "test")["spec"], pod_spec(rendered.one("Job", "check"))]

    assert len(pods) == 5
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] >= 10_000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(container["securityContext"] == RESTRICTED for container in pod["containers"])
        assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        (
            {},
            {
                "runAsUser": 0,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]},
            },
        ),
        (
            {"lockMemory": True},
            {
                "runAsUser": 0,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "IPC_LOCK"]},
            },
        ),
        ({"privileged": True}, {"runAsUser": 0, "privileged": True}),
        ({"preset": "cuda"}, {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}),
    ],
)
def test_exceptions_for_devices_are_asked_for(accelerator, expected):
    engine = pod_spec(render(values={"engine": {"accelerator": accelerator}}).one("StatefulSet", "engine"))

    assert engine["containers"][0]["securityContext"] == expected


def test_engines_are_closed_to_everyone_but_the_gateway():
    rendered = render(PRODUCTION)
    engine = next(
        item for item in rendered.of_kind("NetworkPolicy") if item["metadata"]["name"] == "chat-spillway-engine"
    )

    first, *others = engine["spec"]["ingress"]
    assert first["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert {port["port"] for port in first["ports"]} == {"http", "kv-events", "kv-replay"}
    assert [{port["port"] for port in rule["ports"]} for rule in others] == [{"http"}, {"http"}]
    assert all("from" in rule for rule in engine["spec"]["ingress"])
    assert "Egress" in engine["spec"]["policyTypes"]


def test_redis_is_closed_to_everyone_but_engines():
    policy = next(item for item in render(CHART / "values-cpu.yaml").of_kind("NetworkPolicy", "redis"))

    assert len(policy["spec"]["ingress"]) == 1 and policy["spec"]["egress"] == []
    assert (
        policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
    )


def test_policies_select_real_ports_and_pods():
    for file in EXAMPLES:
        rendered = render(file)
        kinds = ("StatefulSet", "Deployment", "DaemonSet", "LeaderWorkerSet")
        workloads = [each for kind in kinds for each in rendered.of_kind(kind)]
        for policy in rendered.of_kind("NetworkPolicy"):
            wanted = policy["spec"]["podSelector"]["matchLabels"].items()
            if policy["metadata"]["labels"]["app.kubernetes.io/component"] == "test":
                assert policy["spec"]["ingress"] == []
                continue
            chosen = [item for item in workloads if wanted <= item["metadata"]["labels"].items()]
            assert len(chosen) == 1, policy["metadata"]["name"]
            declared = [port for container in pod_spec(chosen[0])["containers"] for port in container["ports"]]
            ports = {port[key] for port in declared for key in ("name", "containerPort")}
            assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())} <= ports


def test_secrets_are_only_referred_to():
    """The chart makes no Secret but of its own values, and no ConfigMap or argument holds one's content."""
    for file in EXAMPLES:
        rendered = render(file)
        [of_values] = rendered.of_kind("Secret")
        assert list(of_values["stringData"]) == ["values.yaml"] and "data" not in of_values
        for workload in [*rendered.of_kind("StatefulSet"), *rendered.of_kind("Deployment")]:
            words = json.dumps([container.get("args") for container in pod_spec(workload)["containers"]]).lower()
            assert "password" not in words and "key" not in words
            for name, value in environment(workload).items():
                if any(word in name for word in ("PASSWORD", "TOKEN", "KEY", "USERNAME")):
                    assert "secretKeyRef" in value


def test_secrets_of_a_tier_are_files_for_its_user_alone():
    tier = {
        "type": "redis",
        "redis": {
            "url": "rediss://r",
            "existingSecret": {"name": "tier-login"},
            "tls": {"caSecret": {"name": "ca"}, "clientSecret": {"name": "client"}},
        },
        "encryption": {"enabled": True, "keyId": "2026", "keySecretName": "tier-seal"},
    }
    values = {"engine": {"accelerator": {"preset": "cpu"}, "offload": {"sharedTier": tier}}}
    rendered = render(values=values)
    pod = pod_spec(rendered.one("StatefulSet", "engine"))

    (volume,) = (volume["projected"] for volume in pod["volumes"] if volume["name"] == "secrets")
    assert volume["defaultMode"] == 0o400
    assert [source["secret"]["name"] for source in volume["sources"]] == ["tier-login", "ca", "client", "tier-seal"]
    # Kubernetes gives the files to root, and lets the group of fsGroup read them.
    assert pod["securityContext"]["runAsUser"] != 0 and pod["securityContext"]["fsGroup"]
    assert all(mount["readOnly"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "secrets")
    assert not any(name in json.dumps(rendered.of_kind("ConfigMap")) for name in ("tier-login", "tier-seal"))


def test_secrets_of_the_gateway_are_files_for_its_user_alone():
    rendered = render(PRODUCTION)
    pod = pod_spec(rendered.one("Deployment", "gateway"))

    (volume,) = (volume["projected"] for volume in pod["volumes"] if volume["name"] == "secrets")
    assert volume["defaultMode"] == 0o400 and pod["securityContext"]["fsGroup"] == 10001
    assert [source["secret"]["name"] for source in volume["sources"]] == ["gateway-keys", "gateway-salt", "engine-key"]
    assert all(mount["readOnly"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "secrets")
    assert environment(rendered.one("Deployment", "gateway")) == {}
    # ConfigMaps name files, not even the Secrets they come from.
    texts = [text for item in rendered.of_kind("ConfigMap", "gateway") for text in item["data"].values()]
    assert not any(f"name: {source['secret']['name']}" in text for source in volume["sources"] for text in texts)


def test_requests_equal_limits_where_it_matters():
    for file in EXAMPLES:
        for workload in render(file).of_kind("StatefulSet", "engine"):
            resources = pod_spec(workload)["containers"][0]["resources"]
            requests, limits = resources["requests"], resources["limits"]
            assert requests["memory"] == limits["memory"]
            assert {name: value for name, value in requests.items() if "/" in name} == {
                name: value for name, value in limits.items() if "/" in name
            }
