"""Another KV connector beside Spillway's: vLLM's configuration for both, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from spillway_engine.errors import SettingsError
from spillway_engine.kv_transfer import NOT_BESIDE
from spillway_engine.settings_reader import engine_settings
from spillway_engine.vllm_arguments import kv_transfer_config, own_transfer_config

NIXL = {"connector": "NixlConnector"}


def configured(offload: dict[str, Any], **kv_transfer: Any) -> dict[str, Any] | None:
    settings = engine_settings({"model": {"path": "/m"}, "offload": offload, "kvTransfer": kv_transfer or None})
    return kv_transfer_config(settings)


def test_both_with_the_other_one_asked_first():
    settings = engine_settings({"model": {"path": "/m"}, "offload": {"numCpuBlocks": 4}, "kvTransfer": NIXL})

    whole = kv_transfer_config(settings)

    assert whole == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, own_transfer_config(settings)]
        },
    }


def test_what_the_other_one_is_given():
    whole = configured(
        {"numCpuBlocks": 4}, connector="Mine", modulePath="a.b", role="kv_producer", extraConfig={"port": 1}
    )

    assert whole is not None
    assert whole["kv_connector_extra_config"]["connectors"][0] == {
        "kv_connector": "Mine",
        "kv_connector_module_path": "a.b",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"port": 1},
    }


def test_the_other_one_alone_where_offload_is_off():
    assert configured({"enabled": False}, **NIXL) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert configured({"enabled": False}) is None


@pytest.mark.parametrize("connector", NOT_BESIDE)
def test_a_second_owner_of_the_cpu_tier_is_refused(connector: str):
    with pytest.raises(SettingsError, match=rf"kvTransfer.connector: {connector} is no second connector"):
        configured({"numCpuBlocks": 4}, connector=connector)


@pytest.mark.parametrize("setting", ["layerwiseLoads", "computeWhileLoading", "fairSteps"])
def test_what_is_not_proven_beside_it_is_refused(setting: str):
    with pytest.raises(SettingsError, match=rf"offload.{setting}: on is not proven beside kvTransfer"):
        configured({"numCpuBlocks": 4, setting: "on"}, **NIXL)


def test_a_secret_in_its_options_is_refused():
    with pytest.raises(SettingsError, match=r"kvTransfer\.extraConfig\.password would show a secret") as refused:
        configured({"numCpuBlocks": 4}, **NIXL, extraConfig={"password": "hunter2"})

    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "Nixl Connector", "a.b"])
def test_a_name_that_is_no_class(name: str):
    with pytest.raises(SettingsError, match=r"kvTransfer\.connector"):
        configured({"numCpuBlocks": 4}, connector=name)
