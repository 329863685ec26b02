from pathlib import Path

import pytest

from spillway_engine.ascend_acceptance.client import EngineFailed
from spillway_engine.ascend_acceptance.engine import changed, running, without_device_cache
from spillway_engine.launch import EngineCommand
from spillway_engine.pod_channel import PodBrief
from spillway_engine.settings import LifecycleSettings
from spillway_engine.settings_reader import engine_settings

POD = {
    "model": {"path": "/m", "maxLength": 8192},
    "host": "0.0.0.0",
    "tensorParallelSize": 2,
    "kvEvents": {"enabled": True, "port": 8200},
    "offload": {"numCpuBlocks": 64, "sharedTier": {"type": "nvme", "nvme": {"path": "/kv"}}},
    "lifecycle": {"selfCheck": "auto", "stopTimeoutSeconds": 30},
}


def test_a_run_is_the_pods_configuration_alone_on_the_machine() -> None:
    settings = engine_settings(changed(POD, {"enabled": True, "batchMemcpy": "off"}, 9000))

    assert (settings.host, settings.port, settings.tensor_parallel_size) == ("127.0.0.1", 9000, 2)
    assert (settings.offload.batch_memcpy, settings.offload.num_cpu_blocks) == ("off", 64)
    assert settings.offload.shared_tier.type == "none" and not settings.kv_events.enabled
    assert settings.lifecycle.stop_timeout_seconds == 30
    assert not engine_settings(changed(POD, {"enabled": False}, 9000)).offload.enabled


def test_the_devices_cache_is_off_and_nothing_else_differs() -> None:
    command = EngineCommand(["vllm", "serve"], {}, PodBrief("m"), LifecycleSettings())
    assert without_device_cache(command).arguments == ["vllm", "serve", "--no-enable-prefix-caching"]


def test_an_engine_that_ends_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    tree = {**POD, "model": {"path": "/nonexistent/model"}}
    with (
        pytest.raises(EngineFailed, match=r"(?s)ended with status \d.*/nonexistent"),
        running(tree, {"enabled": False}, tmp_path, "none"),
    ):
        pass
