"""The chart, while it renders, and the engine service, wherever it is configured, refuse the same arguments of vLLM."""

import pytest
import yaml
from chart.rendering import CHART, RenderRefused, nested, render

from spillway_connector.setting_names import PLAIN_NAMES
from spillway_engine import extra_arguments
from spillway_engine.errors import SettingsError

REFUSED = [
    "--model=/m",
    "--served_model_name",
    "--dtype",
    "--dtype=half",
    "--max-model-len=1",
    "--max_model_len",
    "--seed",
    "--host",
    "--port=1",
    "--block_size=16",
    "--num-gpu-blocks-override=2",
    "--tensor-parallel-size",
    "--tensor_parallel_size=2",
    "-tp",
    "-tp=2",
    "-t",
    "--kv-events-config={}",
    "--kv-transfer-config={}",
    "--kv_transfer_config.kv_role",
    "--kv-transfer-config.kv_connector=X",
    "--kv-trans",
    "--kv-offloading-size=4",
    "--kv_offloading_backend",
    "--prefix-caching-hash-algo=builtin",
    "--prefix_caching_hash",
    "--prefix-match-unit=16",
    "--config",
    "--config=a.yaml",
    "--api-key",
    "--api-key=x",
    "--api_key=x",
    "--api-key x",
    "--api-k=x",
    "--hf-token=x",
    "--hf_token",
    "--proxy_password=x",
]
ACCEPTED = [
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens=512",
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    "--model-impl=vllm",
    "--middleware",
    "a.b",
    "--allow-credentials",
    "-O3",
    "-q",
    "awq",
    "-1",
    "-",
    "--",
    "a=--model",
]


def test_every_argument_that_is_refused_is_refused_by_both() -> None:
    with pytest.raises(RenderRefused) as chart:
        render(CHART / "values-cpu.yaml", values=nested("engine.extraArgs", REFUSED))
    lines = [line for line in str(chart.value).splitlines() if line.startswith("- engine.extraArgs: ")]
    names = {extra_arguments.argument_name(argument) for argument in REFUSED}

    assert {line.split()[2] for line in lines} == names
    for argument in REFUSED:
        with pytest.raises(SettingsError):
            extra_arguments.check_extra_arguments([argument], PLAIN_NAMES)


def test_every_other_argument_is_taken_by_both() -> None:
    render(CHART / "values-cpu.yaml", values=nested("engine.extraArgs", ACCEPTED))
    extra_arguments.check_extra_arguments(ACCEPTED, PLAIN_NAMES)


def test_both_go_by_one_table() -> None:
    table = yaml.safe_load((CHART / "files" / "refused-arguments.yaml").read_text())

    assert table["decidedBySetting"] == extra_arguments.DECIDED_BY_A_SETTING
    assert table["fixed"] == extra_arguments.FIXED
    assert set(table["secret"]) == set(extra_arguments.SECRET)
    assert table["secretName"] == extra_arguments.SECRET_NAME.pattern


def test_a_group_of_engines_is_told_of_its_own_values() -> None:
    values = {"listenAddress": "0.0.0.0", "engines": {"chat": {"extraArgs": ["--host=::", "--dtype=half"]}}}
    with pytest.raises(RenderRefused) as refused:
        render(CHART / "values-cpu.yaml", values=values)

    assert "engines.chat.extraArgs: --host is decided by listenAddress; change that instead" in str(refused.value)
    assert "engines.chat.extraArgs: --dtype is decided by engines.chat.model.dtype" in str(refused.value)
