"""The hook that checks values before pods change: its order, its rights, and that its command takes what it mounts."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.rendering import CHART, VALUES_FILES, Render, RenderRefused, pod_spec, render

from spillway_ctl.command import main

both = pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")


def checked(rendered: Render, folder: Path, values: dict[str, Any] | None = None) -> tuple[int, str]:
    """Exit status and output of the Job's command, on the values that it mounts or on others."""
    [container] = pod_spec(rendered.one("Job", "check"))["containers"]
    file = folder / "values.yaml"
    file.write_text(json.dumps(values) if values else mounted(rendered))
    assert container["command"][:2] == ["spillway", "check"]
    words = [word.replace("/etc/spillway/values.yaml", str(file)) for word in container["command"] + container["args"]]
    return printed_by(words[1:])


def printed_by(words: list[str]) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as printed:
        return main(words), printed.getvalue()


def mounted(rendered: Render) -> str:
    return rendered.one("Secret", "check")["stringData"]["values.yaml"]


@both
@pytest.mark.parametrize("file", [VALUES_FILES[0], CHART / "examples" / "production.yaml"], ids=lambda file: file.stem)
def test_it_takes_the_values_that_the_chart_takes(file: Path, helm: Helm, tmp_path: Path) -> None:
    assert checked(render(file, helm=helm), tmp_path) == (0, "These values are right.\n")


@both
def test_what_null_removed_is_not_there_for_it_either(helm: Helm, tmp_path: Path) -> None:
    values = yaml.safe_load(
        "engine: {offload: {numCpuBlocks: null, cpuBytes: 10GiB}}\n"
        "engines: {a: {}, b: {model: {path: Qwen/Qwen3-4B}, offload: {cpuBytes: null, numCpuBlocks: 99}}}"
    )

    assert checked(render(values=values, helm=helm), tmp_path)[0] == 0


def test_it_refuses_a_contradiction_and_knows_what_the_cluster_lacks(tmp_path: Path) -> None:
    rendered = render(kinds=())
    values = json.loads(mounted(rendered))
    values["redis"]["enabled"] = values["monitoring"]["podMonitor"]["enabled"] = True

    status, text = checked(rendered, tmp_path, values)

    assert status == 1 and "redis.enabled: true, but no engine uses it" in text
    assert "this cluster has no monitoring.coreos.com/v1/PodMonitor" in text


def test_its_values_are_there_before_it_and_go_with_it() -> None:
    rendered = render()
    secret, job = (rendered.one(kind, "check")["metadata"]["annotations"] for kind in ("Secret", "Job"))

    assert {each["helm.sh/hook"] for each in (secret, job)} == {"pre-install,pre-upgrade"}
    assert int(secret["helm.sh/hook-weight"]) < int(job["helm.sh/hook-weight"])
    assert job["helm.sh/hook-output-log-policy"] == "hook-failed"
    assert "before-hook-creation" in job["helm.sh/hook-delete-policy"]
    assert "hook-failed" in secret["helm.sh/hook-delete-policy"]
    assert "hook-failed" not in job["helm.sh/hook-delete-policy"]  # its log is for a person to read
    assert rendered.one("Job", "check")["spec"]["ttlSecondsAfterFinished"] > 3600  # helm uninstall leaves it


def test_it_runs_once_without_rights_and_where_the_gateway_runs() -> None:
    gateway = {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"role": "front"}, "priorityClassName": "high"}
    image = {"registry": "registry.local:5000", "pullSecrets": [{"name": "regcred"}]}
    rendered = render(values={"gateway": gateway, "image": image})
    job = rendered.one("Job", "check")
    spec = pod_spec(job)
    [container] = spec["containers"]

    assert job["spec"]["backoffLimit"] == 0 and job["spec"]["activeDeadlineSeconds"] < 300  # Helm's --timeout
    assert spec["automountServiceAccountToken"] is False and "serviceAccountName" not in spec
    assert spec["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert {key: spec[key] for key in gateway} == gateway
    assert container["image"].startswith("registry.local:5000/spillway-tools:")
    assert spec["imagePullSecrets"] == [{"name": "regcred"}]


@both
def test_as_a_part_of_another_chart_its_sentences_have_the_level_above(helm: Helm, tmp_path: Path) -> None:
    parent = tmp_path / "umbrella"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts" / "spillway").symlink_to(CHART)
    dependencies = [{"name": "spillway", "version": "0.1.0", "alias": "chat-models"}]
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": dependencies}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    given = {"global": {"imageRegistry": "r.local"}, "chat-models": {"gateway": {"replicas": 3}}}

    rendered = render(values=given, helm=helm, chart=parent)
    values = json.loads(mounted(rendered))
    values["chat-models"]["redis"]["enabled"] = True

    assert checked(rendered, tmp_path) == (0, "These values are right.\n")
    sentence = "- chat-models.redis.enabled: true, but no engine uses it"
    assert sentence in checked(rendered, tmp_path, values)[1]
    # In a pipeline, which has no word of the part.
    file = tmp_path / "rendered.yaml"
    file.write_text(rendered.text)
    assert printed_by(["check", "--rendered", str(file)])[0] == 0
    secret = rendered.one("Secret", "check")
    secret["stringData"]["values.yaml"] = json.dumps(values)
    file.write_text(yaml.safe_dump(secret))
    assert sentence in printed_by(["check", "--rendered", str(file)])[1]


def test_contents_of_objects_that_no_secret_can_hold_are_left_out(tmp_path: Path) -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own"}}
    rendered = render(values={"extraObjects": [{**extra, "data": {str(part): "x" * 400_000 for part in range(3)}}]})

    assert json.loads(mounted(rendered))["extraObjects"] == [extra]
    assert checked(rendered, tmp_path)[0] == 0
    with pytest.raises(RenderRefused, match=r"checks\.hook: true, but the values take [0-9]+ bytes"):
        render(values={"engine": {"podAnnotations": {"a": "x" * (1 << 20)}}})


def test_it_can_be_turned_off() -> None:
    rendered = render(values={"checks": {"hook": False}})

    assert not rendered.of_kind("Job") and not rendered.of_kind("Secret")
