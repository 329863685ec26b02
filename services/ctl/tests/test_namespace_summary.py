from __future__ import annotations

import json

from ctl_media import ONE, OTHER

from spillway_ctl.namespace_summary import describe


def test_a_document_of_the_connector_in_words() -> None:
    assert describe(json.loads(ONE.document)) == {
        "model": "acme/small at 0123456789ab, bfloat16",
        "layout": "cpu:amx, 2 layers, 128 tokens per frame",
        "parallel": "one rank",
    }


def test_what_deviates_is_said() -> None:
    facts = {
        "weights": "weights:fedcba98765432100000",
        "weights_version": "step 7",
        "dtype": "torch.float16",
        "kv_cache_dtype": "fp8",
        "quantization": "awq",
        "physical_layout": "npu:HND",
        "layout": [{"chip": "Ascend910_9391", "layers": [{"backend": "ASCEND"}, {"backend": "ASCEND"}, {}]}],
        "versions": {"vllm": "0.23.0", "torch": "2.9.0"},
        "groups": [{"block_tokens": 128, "layers": ["a"] * 3}, {"block_tokens": 64, "layers": ["b"]}],
        "blocks_per_chunk": 4,
        "parallel": {"tensor": 8, "pipeline": 1, "decode_context": 2},
        "hash_algorithm": "sha256_cbor",
        "hash_seed": "0",
        "codec": {"cipher": "AES-256-GCM", "key_id": "2026-a"},
    }
    assert describe(facts) == {
        "model": "weights fedcba987654 named 'step 7', float16, KV as fp8, awq",
        "layout": "npu:HND, Ascend910_9391, ASCEND, 4 layers, 2 groups, 4 x 64 or 128 tokens per frame",
        "versions": "torch 2.9.0, vllm 0.23.0",
        "parallel": "tensor 8, decode context 2",
        "hash": "sha256_cbor, seed 0",
        "codec": "encrypted with AES-256-GCM, key id 2026-a",
    }


def test_a_document_that_says_less_is_described_as_far_as_it_goes() -> None:
    assert describe(json.loads(OTHER.document))["parallel"] == "tensor 2"
    assert describe({"bench": "x"}) == {"document": '{"bench": "x"}'}
    assert len(describe({"bench": "x" * 500})["document"]) == 100
    odd = {"groups": "odd", "parallel": 3, "layout": [3], "versions": 3}
    assert describe(odd)["document"].startswith("{")
    assert "layout" not in describe({"layout": [{"layers": 3}], "weights": "hub:a/b@0123"})
