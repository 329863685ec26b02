"""A plug-in of vLLM for tests: its CPU platform gets what a mixture of experts lacks there.

vLLM 0.23 computes experts with kernels for AVX-512 or with PyTorch; here it is always PyTorch, so that every machine
runs the same. Without AVX-512 vLLM then asks for its configuration in the middle of a forward pass, where none is set,
to make the activation function; here that is PyTorch's too. The ranks of data parallelism send each other the tokens of
a step, a different number from each, and the CPU communicators of vLLM 0.23 and 0.32 leave out the two operations for
that (`all_gatherv` and `reduce_scatterv` raise NotImplementedError); here they are PyTorch's over Gloo.

`install` runs in every process of vLLM; `plug_in` is for the environment of one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

_COUNTS = "ENGINE_MATRIX_DUMMY_BATCHES"  # folder; each rank's file grows by a byte with each batch
_NAME = "engine_matrix_cpu_experts"


def plug_in(folder: Path) -> dict[str, str]:
    """Environment of a vLLM that has the plug-in; dummy batches are counted in the folder."""
    described = folder / f"{_NAME}-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{_NAME} = {__name__}:install\n")
    paths = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), _COUNTS: str(folder)}


def dummy_batches(folder: Path, rank: int) -> int:
    """Count the dummy batches that a rank has run since its start."""
    counted = folder / f"rank-{rank}"
    return counted.stat().st_size if counted.exists() else 0


def install() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.v1.worker.cpu_worker import CPUWorker

    cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = lambda *_: (False, "none")
    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = _silu_and_mul
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    run = CPUWorker.execute_dummy_batch

    def counted(worker: Any) -> None:
        run(worker)
        if _COUNTS not in os.environ:
            return
        rank = worker.parallel_config.data_parallel_rank
        with (Path(os.environ[_COUNTS]) / f"rank-{rank}").open("ab") as file:
            file.write(b".")

    CPUWorker.execute_dummy_batch = counted


def _silu_and_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _all_gatherv(communicator: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, in the order of the ranks."""
    if isinstance(given, list):
        return [_all_gatherv(communicator, tensor, dim, sizes) for tensor in given]
    assert dim == 0 and sizes is not None
    # Gloo wants equal parts.
    padded = given.new_zeros((max(sizes), *given.shape[1:]))
    padded[: len(given)] = given
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(communicator: Any, given: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Return this rank's rows of the sum."""
    assert dim == 0 and sizes is not None
    total = given.clone()
    distributed.all_reduce(total, group=communicator.device_group)
    before = sum(sizes[: communicator.rank_in_group])
    return total[before : before + sizes[communicator.rank_in_group]].clone()
