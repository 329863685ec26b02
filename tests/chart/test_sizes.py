"""Sizes with Kubernetes' suffixes are read wherever values take a size."""

import json

import yaml
from chart.rendering import Render, pod_spec, render


def test_kubernetes_own_suffixes_everywhere():
    engine = {
        "memory": {"limit": "64G", "sharedMemory": "40G"},
        "model": {"cache": {"sizeLimit": "80G"}},
        "offload": {"sharedTier": {"type": "redis", "loadQueueBytesMax": "4G"}},
    }
    values = {
        "engine": engine,
        "redis": {"enabled": True, "memory": "8G"},
        "gateway": {"resources": {"requests": {"memory": "1G"}, "limits": {"memory": "2G"}}},
    }

    rendered = render(values=values)

    assert "maxmemory 6000000000\n" in rendered.one("ConfigMap", "redis")["data"]["valkey.conf"]
    assert memory(rendered, "redis") == {"requests": "7630Mi", "limits": "7630Mi"}
    assert memory(rendered, "gateway", "Deployment") == {"requests": "954Mi", "limits": "1908Mi"}
    assert memory(rendered, "engine") == {"requests": "61036Mi", "limits": "61036Mi"}
    volumes = {volume["name"]: volume for volume in pod_spec(rendered.one("StatefulSet", "engine"))["volumes"]}
    assert volumes["hub"]["emptyDir"] == {"sizeLimit": "76294Mi"}
    settings = yaml.safe_load(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"])
    assert settings["offload"]["sharedTier"]["loadQueueBytesMax"] == 4_000_000_000
    assert '"0Mi"' not in json.dumps(rendered.objects)


def memory(rendered: Render, component: str, kind: str = "StatefulSet") -> dict[str, str]:
    resources = pod_spec(rendered.one(kind, component))["containers"][0]["resources"]
    return {part: amounts["memory"] for part, amounts in resources.items()}
