"""Every values file of the chart: both Helm majors, all supported Kubernetes versions, reviewed output."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from chart.helm_binaries import helms
from chart.rendering import CHART, VALUES_FILES, Render, RenderRefused, render, require_valid
from chart.reviewed import different, reviewed

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = [f"1.{minor}" for minor in range(28, 37)]
REVIEWED = [CHART / "values.yaml", CHART / "examples" / "production.yaml"]
named = pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)


@named
def test_both_majors_render_the_same_objects(file):
    helm3, helm4 = (render(file, helm=helm) for helm in helms())

    assert _by_name(helm3) == _by_name(helm4)


def _by_name(rendered: Render) -> dict[tuple[str, str], dict]:
    found = {(item["kind"], item["metadata"]["name"]): item for item in rendered.objects}
    assert len(found) == len(rendered.objects), "one kind and name twice"
    return found


@named
def test_objects_are_valid_on_every_supported_version(file):
    old, new = render(file, kubernetes="1.28"), render(file, kubernetes="1.36")

    for version in VERSIONS:
        require_valid(old if version < "1.30" else new, version)


@pytest.mark.parametrize("file", REVIEWED, ids=lambda file: file.stem)
def test_output_is_as_reviewed(file):
    """UPDATE_GOLDEN=1 writes the files again; the difference is then for a person to read."""
    text = reviewed(render(file))
    golden = GOLDEN / f"{file.stem}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)

    assert text == golden.read_text()


def test_a_golden_has_what_differs_from_the_defaults():
    defaults = {"log": {"level": "info"}, "bytesMax": "64MiB", "port": 1, "on": 1}

    assert different({"log": {"level": "info"}, "bytesMax": 64 << 20, "port": 1}, defaults) == {}
    changed = {"log": {"level": "debug"}, "bytesMax": 1, "port": 2, "on": True, "further": None}
    assert different(changed, defaults) == changed


def test_no_golden_file_is_left_over():
    assert {file.name for file in GOLDEN.glob("*.yaml")} == {file.name for file in REVIEWED}


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_lint_has_nothing_to_say(helm):
    done = subprocess.run(
        [helm.path, "lint", "--strict", CHART], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout and "[ERROR]" not in done.stdout


def test_package_refuses_what_the_chart_refuses(tmp_path):
    helm = helms()[1].path
    subprocess.run([helm, "package", CHART, "-d", tmp_path], check=True, capture_output=True, timeout=60)
    package = next(tmp_path.glob("*.tgz"))

    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert "spillway/values.schema.json" in names
    assert {"spillway/files/model-shapes.yaml", "spillway/templates/NOTES.txt"} <= set(names)
    refused = subprocess.run(
        [helm, "template", "x", package, "--set", "engine.offlaod.enabled=true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode != 0 and "offlaod" in refused.stderr


def test_old_kubernetes_is_refused():
    with pytest.raises(RenderRefused, match=r"1\.27"):
        render(kubernetes="1.27")


def notes_of(*arguments: str | Path) -> str:
    """`helm template` leaves NOTES out; an install that only pretends shows them."""
    done = subprocess.run(
        [helms()[1].path, "install", "chat", CHART, "-n", "llm", "--dry-run=client", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.parametrize(
    ("sets", "command"),
    [
        ("gateway.replicas=2", "curl http://127.0.0.1:8000/v1/models"),
        (
            "gateway.auth.keysSecret.name=keys,gateway.auth.saltSecret.name=salt",
            'curl -H "authorization: Bearer $KEY" http://127.0.0.1:8000/v1/models',
        ),
    ],
)
def test_notes_ask_the_gateway_with_a_key_where_it_wants_one(sets: str, command: str):
    assert command in [line.strip() for line in notes_of("--set", sets).splitlines()]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("gateway.ingress.enabled=true", "ingress-nginx ends a request after 60 s without a byte"),
        ("gateway.ingress.enabled=true", "bodies above 1 MiB. Its annotations are set to 910 s"),
        ("image.registry=", "image.registry is empty: nodes look for spillway-gateway on Docker Hub"),
    ],
)
def test_notes_name_what_fails_later(sets: str, said: str):
    assert said in notes_of("--set", sets)
    assert said not in notes_of("--set", "image.registry=registry.example.com")


@pytest.mark.parametrize(
    ("given", "seconds", "body"),
    [
        ({}, 910, "64m"),
        ({"timeouts": {"idleSeconds": 2000}, "limits": {"bodyBytesMax": "1500KiB"}}, 2010, "2m"),
        ({"timeouts": {"plainSeconds": 60}}, 310, "64m"),
    ],
)
def test_an_ingress_has_the_gateways_own_bounds(given, seconds, body):
    own = {"nginx.ingress.kubernetes.io/proxy-send-timeout": "7"}
    gateway = {**given, "ingress": {"enabled": True, "annotations": own}}

    annotations = render(values={"gateway": gateway}).one("Ingress")["metadata"]["annotations"]

    assert annotations == {
        "nginx.ingress.kubernetes.io/proxy-read-timeout": str(seconds),
        "nginx.ingress.kubernetes.io/proxy-body-size": body,
        **own,
    }


def test_a_model_that_sleeps_keeps_an_ingress_waiting_while_it_wakes():
    scaling = {"enabled": True, "minReplicas": 0, "trigger": "gateway"}
    values = {"engine": {"autoscaling": scaling}, "gateway": {"ingress": {"enabled": True}}}

    annotations = render(values=values).one("Ingress")["metadata"]["annotations"]

    assert annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "1810"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("type=none", "none"),
        (
            "type=nvme,nvme.mode=files,nvme.volume.type=sharedClaim,nvme.volume.size=100GiB",
            "nvme, files, up to 90.0 GiB on sharedClaim",
        ),
        (
            "type=nvme,nvme.volume.type=emptyDir,nvme.maxBytes=50GiB",
            "nvme, auto, up to 50.0 GiB on emptyDir (one volume per pod, not shared)",
        ),
        ("type=nvme", "nvme, auto, up to 4/5 of what the file system can give on hostPath"),
        (
            "type=redis,redis.url=rediss://r:1/0,encryption.enabled=true,encryption.keyId=k1,encryption.keySecretName=s",
            "redis, rediss://r:1/0, sealed with key k1",
        ),
    ],
)
def test_notes_say_what_the_shared_tier_is(sets: str, said: str):
    sets = ",".join(f"engine.offload.sharedTier.{each}" for each in sets.split(","))
    lines = [line.strip() for line in notes_of("--set", sets).splitlines()]

    assert f"shared tier             {said}" in lines


@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        ("type=nvme,nvme.volume.hostPath=/disk/kv", True),
        ("type=nvme,nvme.maxBytes=1TiB", False),
        ("type=nvme,nvme.volume.type=perPodClaim", False),
        ("type=none", False),
    ],
)
def test_notes_warn_of_a_tier_that_may_take_a_nodes_disk(sets: str, warned: bool):
    sets = ",".join(f"engine.offload.sharedTier.{each}" for each in sets.split(","))
    warning = "nvme.maxBytes is null: in time the tier keeps 4/5 of what is free now on each node's disk under /disk/kv"

    assert (warning in notes_of("--set", sets)) is warned


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("null", "above 140.6 MiB/s per engine for every 1000 tokens/s that it prefills"),
        ("8000", "above 1.1 GiB/s per engine, at the given 8000 tokens/s of prefill"),
    ],
)
def test_notes_say_from_which_bandwidth_on_a_tier_saves_time(rate: str, said: str):
    """Qwen3-8B: 147,456 bytes for each token."""
    sets = f"engine.offload.prefillTokensPerSecond={rate},engine.offload.sharedTier.type=nvme"

    assert f"it saves time           {said}" in notes_of("--set", sets)


def test_notes_name_the_real_objects():
    notes = notes_of("-f", CHART / "values-cpu.yaml")

    assert "port-forward service/chat-spillway-gateway 8000:80" in notes
    assert "smollm2-135m-instruct (chat-spillway-engine, 2 pods, vLLM 0.23)" in notes
    assert "128 chunks, 16384 tokens" in notes
    assert "helm test chat -n llm" in notes


def test_values_and_examples_are_tidy():
    for file in VALUES_FILES:
        text = file.read_text()
        assert not any(line != line.rstrip() or len(line) > 120 for line in text.splitlines()), file
        assert yaml.safe_load(text)
