import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillway_engine.ascend_versions import AscendVersions
from spillway_engine.errors import BudgetError, SettingsError
from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape, load_model_shape
from spillway_engine.pod_channel import PodBrief
from spillway_engine.reference_likelihood import MODEL_FILE, REFERENCES
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings

SHAPE = ModelShape(30, 3, 64, None, "bfloat16", 8192, 0)
MACHINE = Machine("cpu", frozenset(), (0, 1), 12 << 30, "MemAvailable", 6 << 30, 6 << 30)
CONFIG = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576,
    "dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip


def settings(**more: Any) -> EngineSettings:
    return read_settings(EngineSettings, {"model": {"path": "/models/x"}, "deviceBlocks": 80, **more})


def test_the_table_shows_the_arithmetic() -> None:
    table = resolve_engine(settings(offload={"numCpuBlocks": 96}), SHAPE, MACHINE).table()

    assert "KV per token   46,080 B" in table
    assert "KV per block   5,898,240 B of 128 tokens" in table
    assert "96 chunks x 5,898,240 B = 540.0 MiB, 12,288 tokens" in table


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"set offload\.numCpuBlocks <="):
        resolve_engine(settings(offload={"numCpuBlocks": 9000}), SHAPE, MACHINE).require_fit()


@pytest.mark.parametrize("check", ["refuse", "warn"])
def test_an_ascend_driver_that_is_too_old_is_told_before_the_start(check: str) -> None:
    machine = replace(
        MACHINE, platform="npu", ascend=AscendVersions("0.23.0", "25.0.3", "9.1.0", "2.10.0.post4", "2.10.0.post4")
    )
    engine = resolve_engine(settings(offload={"numCpuBlocks": 96}, versionCheck=check), SHAPE, machine)

    if check == "refuse":
        with pytest.raises(
            BudgetError, match=r"needs driver 25\.2 .* driver 25\.0\.3, .*; or .* by versionCheck: warn"
        ):
            engine.require_fit()
    else:
        engine.require_fit()
    assert any("driver 25.0.3" in text for text in engine.warnings())


def test_a_file_that_this_pod_lacks_is_told_before_the_start() -> None:
    tier = {"type": "nvme", "nvme": {"path": "/kv"}, "encryption": {"keyId": "a", "keyFile": "/nowhere/key"}}
    given = settings(offload={"numCpuBlocks": 96, "sharedTier": tier})

    with pytest.raises(SettingsError, match=r"encryption\.keyFile: /nowhere/key cannot be read"):
        resolve_engine(given, SHAPE, MACHINE).require_fit()


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({}, "none"),
        ({"type": "redis", "redis": {"url": "redis://c:6379/0"}}, "redis, redis://c:6379/0"),
        (
            {"type": "nvme", "nvme": {"path": "/kv", "mode": "slab", "maxBytes": "4GiB"}},
            "nvme, /kv, slab, up to 4.0 GiB",
        ),
        (
            {"type": "nvme", "nvme": {"path": "/kv"}, "encryption": {"keyId": "2026", "keyFile": "/k"}},
            "nvme, /kv, auto, up to four fifths of what the file system can give, sealed with key 2026",
        ),
    ],
)
def test_the_table_says_where_prefixes_are_shared(tier: dict[str, Any], message: str) -> None:
    table = resolve_engine(settings(offload={"numCpuBlocks": 96, "sharedTier": tier}), SHAPE, MACHINE).table()

    assert f"shared tier    {message}" in table.splitlines()[7]


SIZES = {
    "numCpuBlocks": None,
    "cpuBytes": "1GiB",
    "nodeTier": {"path": "/node", "bytes": "1GiB"},
    "sharedTier": {"type": "nvme", "nvme": {"path": "/kv", "maxBytes": "2GiB"}},
}


@pytest.mark.parametrize("left_out", [*SIZES])
def test_every_size_reaches_the_middleware_as_a_number(left_out: str) -> None:
    """A type of the settings' own that is an integer is one to the process that reads it."""
    given = {name: value for name, value in SIZES.items() if name != left_out}
    if left_out == "cpuBytes":
        given["numCpuBlocks"] = 40
    engine = resolve_engine(settings(offload=given), SHAPE, MACHINE)
    brief = PodBrief.from_environment(engine.command().environment | engine.command().brief.to_environment())

    offload = brief.configuration["settings"]["offload"]
    if left_out != "nodeTier":
        assert offload["nodeTier"]["bytes"] == brief.configuration["memory"]["node_tier_bytes"] == 1 << 30
    if left_out != "sharedTier":
        assert offload["sharedTier"]["nvme"]["maxBytes"] == 2 << 30


def test_the_command_carries_the_brief_of_the_middleware() -> None:
    command = resolve_engine(settings(offload={"numCpuBlocks": 96}), SHAPE, MACHINE).command()

    assert command.arguments[1:4] == ["-m", "spillway_engine.server", "vllm.entrypoints.openai.api_server"]
    assert (command.brief.dtype, command.brief.eager, command.brief.quantised_kv) == ("float32", True, False)
    assert (command.brief.reference, command.brief.vocabulary, command.brief.self_check_text) == (None, None, "")
    assert command.brief.configuration["memory"]["bytes_per_token"] == 46_080


def brief_of(folder: Path, **lifecycle: Any) -> PodBrief:
    """lifecycle: with extraArgs, and further settings of the model as `model`."""
    model = {"path": str(folder), **lifecycle.pop("model", {})}
    given = {"model": model, "offload": {"enabled": False}, "deviceBlocks": 80}
    extra = lifecycle.pop("extraArgs", [])
    settings = read_settings(EngineSettings, {**given, "lifecycle": lifecycle, "extraArgs": extra})
    return resolve_engine(settings, load_model_shape(str(folder)), MACHINE).command().brief


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 49_152}))
    (tmp_path / MODEL_FILE).write_text(f"{next(iter(REFERENCES))}\n")
    return tmp_path


def test_a_known_model_is_known_by_what_its_folder_says(folder: Path) -> None:
    assert brief_of(folder).reference == next(iter(REFERENCES))
    assert brief_of(folder).vocabulary == 49_152


@pytest.mark.parametrize("content", ["another-model-1", "", "\xff"])
def test_another_model_has_no_reference(folder: Path, content: str) -> None:
    (folder / MODEL_FILE).write_text(content, encoding="latin-1")

    assert brief_of(folder).reference is None


@pytest.mark.parametrize("argument", ["--hf_overrides={}", "--hf-overrides.rope_theta=1"])
def test_arguments_that_change_the_model_leave_it_without_a_reference(folder: Path, argument: str) -> None:
    assert brief_of(folder, extraArgs=[argument]).reference is None


def test_quantised_weights_are_another_model(folder: Path) -> None:
    assert brief_of(folder, model={"quantization": "fp8"}).reference is None


@pytest.mark.parametrize(("kv_dtype", "quantised"), [("auto", False), ("float16", False), ("fp8_e5m2", True)])
def test_a_quantised_kv_cache_is_measured_with_more_tolerance(folder: Path, kv_dtype: str, quantised: bool) -> None:
    assert brief_of(folder, model={"kvCacheDtype": kv_dtype}).quantised_kv is quantised


@pytest.mark.parametrize(
    ("arguments", "logits"),
    [
        (["--logprobs-mode", "raw_logits"], True),
        (["--logprobs-mode=raw_logits", "--logprobs-mode=raw_logprobs"], False),
        (["--logprobs-mode=processed_logprobs"], False),
    ],
)
def test_arguments_that_change_what_is_measured_reach_the_check(
    folder: Path, arguments: list[str], logits: bool
) -> None:
    assert brief_of(folder, extraArgs=arguments).generates_logits is logits


def test_a_person_may_switch_the_check_off_or_change_its_text(folder: Path) -> None:
    text = "Alle Menschen werden Brüder, wo dein sanfter Flügel weilt."

    assert not brief_of(folder, selfCheck="off").self_check
    assert brief_of(folder, selfCheckText=text).self_check_text == text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spillway_engine", *arguments], capture_output=True, text=True, check=False
    )


def test_print_config_is_json_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = run("--print-config", "--set", f"model.path={tmp_path}", "--set", "offload.numCpuBlocks=8",
               "--set", "deviceBlocks=80", "--set", "model.dtype=bfloat16")  # fmt: skip
    shown = json.loads(done.stdout)

    assert done.returncode == 0
    assert shown["memory"]["cpu_tier_bytes"] == 8 * 2_949_120
    assert shown["settings"]["offload"]["numCpuBlocks"] == 8
    assert "--kv-transfer-config" in shown["arguments"]


def test_a_refusal_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = run("--set", f"model.path={tmp_path}", "--set", "offload.numCpuBlocks=100000000")

    assert done.returncode == 2
    assert done.stderr.startswith("spillway_engine: offload.numCpuBlocks: 100000000 needs")
    assert "Traceback" not in done.stderr
