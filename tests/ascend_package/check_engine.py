"""The connector's assumptions about vLLM hold with vllm-ascend's patches in force, and Spillway's messages and settings
say of vllm-ascend what its package says."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest
import vllm_ascend
import yaml
from acl_emulator import build
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.copier import Direction
from spillway_connector.device.npu.copier import NpuCopier
from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.generation import Generation, generation, require
from spillway_connector.engine.namespace import fields as namespace_fields
from spillway_connector.engine.namespace.config_fields import ENVIRONMENT_PREFIX_OF_PLUGINS
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.engine.worker.transports import open_transport, transport_name
from spillway_connector.native_keys import BATCH_MEMCPY_VARIABLE
from spillway_connector.testing.memory import unnamed_region
from spillway_engine.ascend_versions import CANN_OF_VLLM_ASCEND, read_ascend_versions

ROOT = Path(vllm_ascend.__file__).parents[1]
CHART = Path(__file__).resolve().parents[2] / "charts" / "spillway"
SPEC = "vllm_ascend.kv_offload.npu"


def test_this_is_the_release_that_is_supported() -> None:
    found = read_ascend_versions({}, Path("/nonexistent"), ())

    assert found.vllm_ascend == "0.23.0.post1" and found.torch_npu_needed == "2.10.0.post4"
    assert (0, 23) in CANN_OF_VLLM_ASCEND
    assert generation() is Generation.V023


def test_what_the_connector_relies_on_is_there_behind_their_patches() -> None:
    require(SEAMS)


def test_their_own_spec_does_not_import_with_the_vllm_that_they_pair_with() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.v1\.kv_offload\.abstract"):
        importlib.import_module(SPEC)


def test_their_registration_leaves_our_connector_alone() -> None:
    vllm_ascend.register_connector()
    config = KVTransferConfig(
        kv_connector="SpillwayConnector",
        kv_connector_module_path="spillway_connector.engine.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )

    found = KVConnectorFactory.get_connector_class(config)

    assert found.__module__.startswith("spillway_connector.")
    theirs = KVConnectorFactory._registry["SimpleCPUOffloadConnector"]()
    assert theirs.__name__ == "AscendSimpleCPUOffloadConnector"


def test_their_runner_calls_connectors_as_vllm_does() -> None:
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    assert issubclass(NPUModelRunner, KVConnectorModelRunnerMixin)
    taken = inspect.getsource(NPUModelRunner)
    for step in ("maybe_get_kv_connector_output", "register_kv_caches"):
        assert step in taken
        assert step not in vars(NPUModelRunner)


def test_on_their_platform_copies_go_through_the_npu_transport() -> None:
    from vllm_ascend.platform import NPUPlatform

    assert isinstance(current_platform, NPUPlatform)
    region = unnamed_region(4, 1 << 16)
    config = ConnectorConfig.parse({"num_cpu_blocks": 4, "acl_library_path": str(build.library())})
    opened = open_transport(config, region)
    copiers = [opened.copier(direction) for direction in Direction]

    assert transport_name(opened) == "npu"
    assert all(isinstance(copier, NpuCopier) for copier in copiers)
    for copier in copiers:
        copier.close()
    region.cleanup()


def test_hybrid_models_start_with_the_policy_that_their_platform_accepts_and_recompute() -> None:
    from types import SimpleNamespace

    from vllm_ascend.platform import NPUPlatform

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        model_config=SimpleNamespace(is_hybrid=True),
        attention_config=SimpleNamespace(),
    )
    with pytest.raises(AssertionError, match="Hybrid models do not support recompute"):
        NPUPlatform._validate_kv_load_failure_policy(config)

    config.kv_transfer_config.kv_load_failure_policy = "fail"
    NPUPlatform._validate_kv_load_failure_policy(config)
    ConnectorBase._check(SEAMS, config)

    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_the_cpus_that_binding_needs_are_those_of_the_presets() -> None:
    from vllm_ascend import cpu_binding

    presets = yaml.safe_load((CHART / "files" / "accelerators.yaml").read_text())
    assert presets["mindcluster"]["cpusPerDevice"] == cpu_binding.MIN_CPUS_PER_NPU
    assert presets["a5"]["cpusPerDevice"] == cpu_binding.MIN_CPUS_PER_NPU_WITHOUT_IRQ


def test_the_switch_of_batched_copies_is_read_by_their_build_alone() -> None:
    """The switch is therefore answered with the setting to use here."""
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in [ROOT / "setup.py", *(ROOT / "vllm_ascend").rglob("*.py")]
        if BATCH_MEMCPY_VARIABLE in path.read_text()
    ]
    assert readers == ["setup.py"] or readers == ["setup.py", "vllm_ascend/envs.py"]


def test_their_variables_count_in_the_namespace() -> None:
    from vllm_ascend import envs

    named = [name for name in envs.env_variables if name.startswith(ENVIRONMENT_PREFIX_OF_PLUGINS)]
    assert len(named) > 5
    assert "vllm_ascend" in inspect.getsource(namespace_fields)
