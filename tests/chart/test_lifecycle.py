"""Start, drain and restart: probes, grace periods from the processes' own deadlines, and who is rolled by what."""

import math
from typing import Any

import pytest
from chart.helm_binaries import Helm, helms
from chart.rendering import laid_over, nested, pod_spec, render

from spillway_engine.launch import DRAIN_REPLY_SECONDS
from spillway_gateway.listeners.server import AFTER_DRAIN_SECONDS

CONFIG = "checksum/config"


def probes(workload):
    return pod_spec(workload)["containers"][0]


@pytest.mark.parametrize(
    ("delay", "timeout", "stop", "pre_stop"), [(5, 300, 20, 2), (0, 0, 1, 0), (2.5, 1800, 45.5, 10)]
)
def test_grace_period_covers_every_phase_of_the_engine(delay, timeout, stop, pre_stop):
    lifecycle = {
        "drainDelaySeconds": delay,
        "drainTimeoutSeconds": timeout,
        "stopTimeoutSeconds": stop,
        "preStopSeconds": pre_stop,
    }
    pod = pod_spec(render(values=nested("engine.lifecycle", lifecycle)).one("StatefulSet", "engine"))

    longest = pre_stop + delay + timeout + DRAIN_REPLY_SECONDS + stop
    assert longest + 5 <= pod["terminationGracePeriodSeconds"] <= math.ceil(longest) + 15


@pytest.mark.parametrize(("delay", "timeout", "pre_stop"), [(1, 300, 5), (0, 0, 0), (2.5, 3600, 20)])
def test_grace_period_covers_every_phase_of_the_gateway(delay, timeout, pre_stop):
    lifecycle = {"drainDelaySeconds": delay, "drainTimeoutSeconds": timeout, "preStopSeconds": pre_stop}
    pod = pod_spec(render(values=nested("gateway.lifecycle", lifecycle)).one("Deployment", "gateway"))

    longest = pre_stop + delay + timeout + AFTER_DRAIN_SECONDS
    assert longest < pod["terminationGracePeriodSeconds"] <= math.ceil(longest) + 10


def test_loading_a_model_may_take_as_long_as_the_values_say():
    engine = probes(render(values=nested("engine.lifecycle.startupTimeoutSeconds", 1805)).one("StatefulSet", "engine"))

    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1805
    assert startup["httpGet"]["path"] == engine["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert engine["livenessProbe"]["httpGet"]["path"] == "/health"


def test_a_second_model_leaves_the_first_one_running():
    """The first model's entry is `default`: its objects are the same, and nothing in its pods' template changes."""
    own = {"offload": {"sharedTier": {"type": "nvme", "nvme": {"volume": {"type": "sharedClaim"}}}}}
    alone = render(values={"engine": own})
    both = render(values={"engines": {"default": own, "small": {"model": {"servedName": "small"}}}})

    for kind in ("StatefulSet", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "ServiceAccount"):
        (before,) = alone.of_kind(kind, "engine")
        assert both.named(kind, before["metadata"]["name"]) == before
    assert len(both.of_kind("StatefulSet", "engine")) == 2


def test_gateway_lives_while_engines_load():
    """The gateway's /ready needs an engine, so only its /health may decide on restarts."""
    gateway = probes(render().one("Deployment", "gateway"))

    assert gateway["startupProbe"]["httpGet"]["path"] == gateway["livenessProbe"]["httpGet"]["path"] == "/health"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/ready"


@pytest.mark.parametrize(
    ("version", "hook"), [("1.29", {"exec": {"command": ["sleep", "2"]}}), ("1.30", {"sleep": {"seconds": 2}})]
)
def test_waiting_before_the_end_suits_the_cluster(version, hook):
    assert probes(render(kubernetes=version).one("StatefulSet", "engine"))["lifecycle"]["preStop"] == hook


def test_rolling_updates_need_no_spare_device_and_leave_no_gap():
    rendered = render()

    assert rendered.one("Deployment", "gateway")["spec"]["strategy"]["rollingUpdate"] == {
        "maxUnavailable": 0,
        "maxSurge": 1,
    }
    assert rendered.one("StatefulSet", "engine")["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"partition": 0},  # all pods
    }


TWO = {"engines": {"a": {"model": {"servedName": "a"}}, "b": {"model": {"servedName": "b"}}}}


@pytest.mark.parametrize(
    ("change", "rolled"),
    [
        (nested("engines.a.offload.numCpuBlocks", 999), {"a"}),
        (nested("engines.b.offload.batchMemcpy", "off"), {"b"}),
        # Gateways let go of requests before engines end: what they wait for follows from the drain.
        (nested("engine.lifecycle.drainTimeoutSeconds", 9), {"a", "b", "gateway"}),
        (nested("engines.a.replicas", 5), set()),  # gateways watch who is there
        (nested("gateway.timeouts.idleSeconds", 9), set()),
        (nested("gateway.routing.adapterLoadSeconds", 9), {"gateway"}),
        (nested("engines.a.model.aliases", ["x"]), set()),
        (nested("gateway.replicas", 5), set()),
        (nested("monitoring", {"alerts": {"enabled": True}, "serviceMonitor": {"enabled": True}}), set()),
        (nested("networkPolicy.enabled", False), set()),
        (nested("engines.b.secretsRevision", "2026-11-21"), {"b"}),
        (nested("gateway.secretsRevision", "2026-11-21"), {"gateway"}),
        (nested("gateway.breaker.failures", 9), {"gateway"}),
        (nested("gateway.auth", {"keysSecret": {"name": "k"}, "saltSecret": {"name": "s"}}), {"gateway"}),
        (nested("redis.extraEnvVars", [{"name": "TZ", "value": "UTC"}]), set()),  # no such server here
        (nested("engines.a.offload.sharedTier", {"type": "nvme", "nvme": {"mode": "slab"}}), {"a"}),
    ],
    # The order of a set differs from process to process, and workers must agree on names.
    ids=lambda value: "+".join(sorted(value)) or "none" if isinstance(value, set) else str(value),
)
def test_a_change_rolls_the_pods_that_read_it_and_no_others(change, rolled):
    before, after = templates(render(values=TWO)), templates(render(values=laid_over(TWO, change)))

    assert {name for name in before if before[name] != after[name]} == rolled


def test_a_gateway_with_a_list_of_engines_starts_again_for_a_longer_one():
    listed = laid_over(TWO, nested("gateway.discovery.type", "static"))
    before = templates(render(values=listed))
    after = templates(render(values=laid_over(listed, nested("engines.a.replicas", 5))))

    assert {name for name in before if before[name] != after[name]} == {"gateway"}


def test_a_first_rollout_may_last_as_long_as_the_slowest_model_loads():
    """A gateway pod is ready only when each model has an engine; Kubernetes' 600 seconds would call that stuck."""
    engines = {"slow": {"lifecycle": {"startupTimeoutSeconds": 7200}}, "fast": {"model": {"servedName": "f"}}}
    gateway = render(values={"engines": engines}).one("Deployment", "gateway")

    assert gateway["spec"]["progressDeadlineSeconds"] >= 7200 + 60


def test_replicas_are_taken_away_slowly():
    """Each takes its CPU tier along. KEDA's own cooldown is about the step to zero alone."""
    scaling = {"enabled": True, "cooldownSeconds": 900}
    spec = render(values=nested("engine.autoscaling", scaling)).one("ScaledObject")["spec"]

    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert spec["cooldownPeriod"] == down["stabilizationWindowSeconds"] == 900
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_how_engines_scale_may_be_said():
    """Given values win; the rest of a scale-down stays as slow as it is."""
    half = {"type": "Percent", "value": 50, "periodSeconds": 600}
    scaling = {"enabled": True, "behavior": {"scaleUp": {"selectPolicy": "Min"}, "scaleDown": {"policies": [half]}}}
    spec = render(values=nested("engine.autoscaling", scaling)).one("ScaledObject")["spec"]

    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == {
        "scaleUp": {"selectPolicy": "Min"},
        "scaleDown": {"policies": [half], "stabilizationWindowSeconds": 600},
    }


@pytest.mark.parametrize("part", ["engine", "gateway"])
def test_a_scale_down_may_be_at_once(part: str) -> None:
    scaling = {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
    rendered = render(values=nested(f"{part}.autoscaling", scaling))

    if part == "engine":
        behavior = rendered.one("ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    else:
        behavior = rendered.one("HorizontalPodAutoscaler", "gateway")["spec"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 0


def test_a_new_chart_version_alone_restarts_nothing():
    """Labels that carry versions stay out of pod templates and selectors."""
    for workload in [*render().of_kind("StatefulSet"), *render().of_kind("Deployment")]:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def templates(rendered):
    return {
        **{key: rendered.named("StatefulSet", f"chat-spillway-engine-{key}")["spec"]["template"] for key in ("a", "b")},
        "gateway": rendered.one("Deployment", "gateway")["spec"]["template"],
    }


LORA = {"adapters": [{"name": "sql", "path": "a/sql"}], "aliases": [{"name": "latest", "adapter": "sql"}]}


def pod_templates(helm: Helm, **given: Any) -> dict[str, Any]:
    values = laid_over({"engine": {"lora": LORA}, "redis": {"enabled": True}}, given)
    objects = render(values=values, helm=helm).objects
    return {
        each["metadata"]["name"]: each["spec"]["template"] for each in objects if "template" in each.get("spec", {})
    }


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
@pytest.mark.parametrize(
    "change",
    [
        {"gateway": {"log": {"level": "debug"}}},
        {"gateway": {"timeouts": {"firstByteSeconds": 77}, "continuation": {"enabled": False}}},
        {"gateway": {"limits": {"bodyBytesMax": "32MiB"}}},
        {"engine": {"model": {"aliases": ["chat"]}}},
        {"engine": {"lora": {"aliases": [{"name": "newest", "adapter": "sql"}]}}},
    ],
    ids=lambda change: next(iter(next(iter(change.values())))),
)
def test_what_gateways_read_again_by_themselves_ends_no_pod(helm: Helm, change: dict[str, Any]) -> None:
    never = {"gateway": {"reload": {"periodSeconds": 0}}}

    assert pod_templates(helm, **change) == pod_templates(helm)
    assert pod_templates(helm, **laid_over(change, never)) != pod_templates(helm, **never)


@pytest.mark.parametrize(
    "change",
    [
        {"gateway": {"routing": {"adapterLoadSeconds": 3}}},
        {"gateway": {"reload": {"periodSeconds": 3}}},
        {"engine": {"model": {"servedName": "chat"}}},
    ],
    ids=str,
)
def test_what_they_read_at_their_start_ends_pods(change: dict[str, Any]) -> None:
    assert pod_templates(helms()[0], **change) != pod_templates(helms()[0])
