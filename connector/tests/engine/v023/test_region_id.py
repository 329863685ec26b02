"""Each engine core maps rows of its own."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.engine import core

from spillway_connector.engine.v023.spec import region_id
from spillway_connector.testing.vllm_parts import part_of


class _Stop(Exception):
    pass


def parallel_config_in(monkeypatch: pytest.MonkeyPatch, *, rank: int, is_moe: bool) -> ParallelConfig:
    """The configuration that vLLM leaves in the process of a data parallel rank when that makes its engine core."""
    seen: list[ParallelConfig] = []

    def begin(_: Any, *, vllm_config: Any, **__: Any) -> None:
        seen.append(vllm_config.parallel_config)
        raise _Stop

    monkeypatch.setattr(core.EngineCoreProc, "__init__", begin)
    monkeypatch.setattr(core.DPEngineCoreProc, "__init__", begin)
    for name in ("set_process_title", "maybe_init_worker_tracer", "decorate_logs"):
        monkeypatch.setattr(core, name, lambda *_: None)
    config = part_of(
        VllmConfig,
        parallel_config=ParallelConfig(data_parallel_size=2, data_parallel_size_local=2, is_moe_model=is_moe),
        model_config=part_of(ModelConfig, is_moe=is_moe),
        kv_transfer_config=None,
    )
    with pytest.raises(_Stop):
        core.EngineCoreProc.run_engine_core(vllm_config=config, dp_rank=rank, local_dp_rank=rank)
    (parallel,) = seen
    return parallel


@pytest.mark.parametrize("is_moe", [False, True])
def test_data_parallel_ranks_never_map_the_same_rows(monkeypatch: pytest.MonkeyPatch, is_moe: bool) -> None:
    configs = [parallel_config_in(monkeypatch, rank=rank, is_moe=is_moe) for rank in range(2)]
    regions = {region_id(part_of(VllmConfig, instance_id="i", parallel_config=each)) for each in configs}

    assert len(regions) == 2
