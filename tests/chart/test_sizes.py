"""Sizes: templates read what the engine service reads, and what cannot be read is never rendered."""

import json

import yaml
from chart.rendering import CHART, Render, pod_spec, render
from size_cases import SIZE_CASES


def test_the_templates_read_the_table_of_sizes(tmp_path):
    chart = tmp_path / "sizes"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: sizes, version: 0.1.0}")
    (chart / "templates" / "_values.tpl").write_text((CHART / "templates" / "_values.tpl").read_text())
    (chart / "templates" / "sizes.yaml").write_text(
        'kind: Sizes\nread:{{ range .Values.cases }}\n- {{ include "spillway.parsedBytes" .value | quote }}{{ end }}\n'
    )
    cases = [{"value": text} for text in SIZE_CASES]

    rendered = render(values={"cases": cases}, chart=chart)

    read = dict(zip(SIZE_CASES, rendered.objects[0]["read"], strict=True))
    assert {text: int(size_bytes) if size_bytes else None for text, size_bytes in read.items()} == SIZE_CASES


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
