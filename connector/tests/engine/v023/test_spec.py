"""Places of a group's layers in a row."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import CanonicalKVCaches

from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.engine.v023.spec import segments_of_layers


def test_segments_are_counted_by_layer():
    group = KVCacheGroupSpec(["a", "shares", "b"], None)
    tensors = [KVCacheTensor(size=1, shared_by=["a"]), KVCacheTensor(size=1, shared_by=["b"])]
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=tensors, kv_cache_groups=[group])
    assert segments_of_layers(CanonicalKVCaches([], [[]]), config) == [1, 0, 1]
    assert segments_of_layers(PlacedKVCaches([], [[]], [], {"a": 2, "b": 3}), config) == [2, 0, 3]
