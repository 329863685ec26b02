"""A rank's description of its KV caches, and how the scheduler's process reads it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import Attention, set_default_quant_scales
from vllm.v1.attention.backend import AttentionBackend

from spillway_connector.engine.layouts import kv_layout
from spillway_connector.engine.layouts.kv_layout import _memory_format, layout_facts, read_layouts, write_layout
from spillway_connector.errors import ConfigError
from spillway_connector.testing.vllm_parts import part_of

BLOCKS = 20
CONFIG = VllmConfig()
NHD, HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)  # orders of FlashAttention's cache in memory (get_kv_cache_stride_order)


def cache(order: tuple[int, ...], blocks: int = BLOCKS) -> torch.Tensor:
    """(blocks, K and V, 16 tokens, 2 heads, 32) laid out in memory by `order`, as vLLM does it."""
    shape = (blocks, 2, 16, 2, 32)
    laid_out = torch.empty([shape[dim] for dim in order], dtype=torch.bfloat16)
    return laid_out.permute([order.index(dim) for dim in range(5)])


def facts(tensor: torch.Tensor | tuple[torch.Tensor, ...], blocks: int = BLOCKS):
    return layout_facts({"layers.0": tensor, "layers.1": tensor}, CONFIG, blocks)


def test_flash_attention_beside_flex_attention_on_cuda():
    """Blocks whose heads come before tokens have other bytes although the shape is the same."""
    assert cache(NHD).shape == cache(HND).shape
    assert facts(cache(NHD)) != facts(cache(HND))


@pytest.mark.parametrize("order", [NHD, HND, (1, 0, 2, 3, 4)])
def test_the_number_of_blocks_is_no_layout(order):
    assert facts(cache(order)) == facts(cache(order, blocks=77), blocks=77)


def test_a_cache_behind_the_pair_of_keys_and_values_is_another_layout():
    assert facts(cache(NHD)) != facts(cache((1, 0, 2, 3, 4)))


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(BLOCKS, 2, 16, 2, 32, dtype=torch.float16),
        torch.empty(BLOCKS, 2, 16, 2, 64, dtype=torch.bfloat16)[..., :32],  # padded
        torch.empty(2 * BLOCKS, 2, 8, 2, 32, dtype=torch.bfloat16),  # two kernel blocks to a block
        (torch.empty(BLOCKS, 16, 2, 32, dtype=torch.bfloat16),) * 2,
    ],
)
def test_other_caches(other):
    assert facts(other) != facts(cache(NHD))


def test_backend_and_scales_of_a_layer_count():
    def layer(backend: str, scale: float) -> Attention:
        class Named(AttentionBackend):
            get_name = staticmethod(lambda: backend)

        made = part_of(Attention, get_attn_backend=lambda: Named)
        torch.nn.Module.__init__(made)
        set_default_quant_scales(made, register_buffer=True)
        assert (made._k_scale_float, made._v_scale_float) == (1.0, 1.0)
        made._k_scale_float = scale
        return made

    found = []
    for module in (layer("FLASH_ATTN", 1.0), layer("FLEX_ATTENTION", 1.0), layer("FLASH_ATTN", 0.5)):
        config = VllmConfig()
        config.compilation_config.static_forward_context["layers.0"] = module
        found.append(layout_facts({"layers.0": cache(NHD)}, config, BLOCKS))
    assert [one["layers"][0]["backend"] for one in found] == ["FLASH_ATTN", "FLEX_ATTENTION", "FLASH_ATTN"]
    assert found[0] != found[1] != found[2] != found[0]


def test_the_memory_format_of_an_npu_counts(monkeypatch: pytest.MonkeyPatch):
    """A cache in FRACTAL_NZ has the shape and strides of one in ND."""
    on_npu, found = SimpleNamespace(device=SimpleNamespace(type="npu")), []
    monkeypatch.setattr(kv_layout, "_memory_format", lambda _: _memory_format(on_npu))
    for number in (2, 29):  # ACL_FORMAT_ND, ACL_FORMAT_FRACTAL_NZ
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda _, number=number: number))
        found.append(facts(cache(NHD)))
    assert found[0] != found[1]
    assert [one["layers"][0]["tensors"][0]["format"] for one in found] == [2, 29]


def test_layers_that_are_alike_are_described_once():
    (layers,) = facts(cache(NHD))["layers"]
    assert layers["names"] == ["layers.0", "layers.1"]


def test_every_rank_is_heard_in_order():
    rows = memoryview(bytearray(4096))
    write_layout(rows, 1024, 1024, {"rank": 1})
    write_layout(rows, 0, 1024, {"rank": 0})
    assert read_layouts(rows, 1024, 2) == [{"rank": 0}, {"rank": 1}]
    write_layout(rows, 1024, 1024, {"rank": 0})
    assert read_layouts(rows, 1024, 2) == [{"rank": 0}]


def test_a_small_cell_holds_a_digest():
    rows, long = memoryview(bytearray(256)), {"layers": ["x" * 100] * 9}
    write_layout(rows, 0, 128, long)
    write_layout(rows, 128, 128, long | {"chip": "other"})
    (one, other) = read_layouts(rows, 128, 2)
    assert one != other


def test_what_is_always_needed_outlives_a_small_cell_beside_the_same_digest():
    """The digest enters the namespace, and what is needed differs by the number of ranks."""
    rows, found = memoryview(bytearray(256)), []
    for needed in (7, 8):
        write_layout(rows, 0, 128, {"layers": ["x" * 100] * 9}, {"needed": needed})
        (layout,) = read_layouts(rows, 128, 1)
        assert layout["needed"] == needed
        found.append(layout["digest"])
    assert found[0] == found[1]


def test_the_ranks_of_each_stage_are_heard_once():
    rows = memoryview(bytearray(4096))
    for rank, layers in enumerate("aabb"):
        write_layout(rows, rank * 1024, 1024, {"layers": layers})
    assert read_layouts(rows, 1024, 4, stages=2) == [{"layers": "a"}, {"layers": "b"}]
    write_layout(rows, 1024, 1024, {"layers": "b"})
    assert [one["layers"] for one in read_layouts(rows, 1024, 4, stages=2)] == list("abbb")


@pytest.mark.parametrize("damage", [b"", b"SPILLKVL" + b"\xff" * 40, b"\0" * 8])
def test_a_rank_without_a_report_is_named(damage: bytes):
    rows = memoryview(bytearray(4096))
    write_layout(rows, 0, 1024, {"rank": 0})
    rows[1024 : 1024 + len(damage)] = damage
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        read_layouts(rows, 1024, 2)
