"""Breaks a running vLLM engine in one way, and repairs it: a worker extension for tests.

vLLM mixes the class into its worker (`--worker-extension-cls`), whose methods /collective_rpc then calls. Weights are
packed for the CPU's kernels when they are loaded, so a scaled projection is one whose output is scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROJECTIONS = ("qkv_proj.q", "qkv_proj.k", "qkv_proj.v", "o_proj", "gate_up_proj.gate", "gate_up_proj.up", "down_proj")


class Sabotage:
    """Mixed into vLLM's worker. Arguments are strings, as /collective_rpc sends them."""

    _undo: Callable[[], None] | None = None
    model_runner: Any

    def mend(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def swap_layers(self, one: str, other: str) -> None:
        layers = self._model.layers

        def swap() -> None:
            first, second = layers[int(one)], layers[int(other)]
            layers[int(one)], layers[int(other)] = second, first

        swap()
        self._undo = swap

    def scale_projection(self, layer: str, projection: str, factor: str) -> None:
        """`projection` is one of PROJECTIONS; `layer` a number, or all."""
        module_name, _, part = projection.partition(".")
        layers = self._model.layers if layer == "all" else [self._model.layers[int(layer)]]
        hooks = []
        for chosen in layers:
            module = dict(chosen.named_modules())[
                f"mlp.{module_name}" if "gate" in module_name or "down" in module_name else f"self_attn.{module_name}"
            ]
            hooks.append(module.register_forward_hook(_scaling(_columns(chosen, part), float(factor))))
        self._undo = lambda: [hook.remove() for hook in hooks]  # type: ignore[func-returns-value]

    def rope_base(self, base: str) -> None:
        import torch

        rope = self._model.layers[0].self_attn.rotary_emb
        kept, right = rope.cos_sin_cache.clone(), rope.base
        rope.base = float(base)
        wrong = rope._compute_cos_sin_cache().to(kept.dtype)
        rope.base = right
        with torch.no_grad():
            rope.cos_sin_cache.copy_(wrong)
        self._undo = lambda: rope.cos_sin_cache.copy_(kept)

    def kv_slot_off(self, when: str) -> None:
        """Store every key and value one slot further than it is read: `always`, or in `decode` steps alone.

        For decode steps a prefill is computed right and then stored again, one slot further.
        """
        from vllm.v1.attention.backends import cpu_attn

        store = cpu_attn.ops.cpu_attn_reshape_and_cache
        attend = cpu_attn.ops.cpu_attention_with_kv_cache
        last: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def store_off(*given: Any, **named: Any) -> None:
            if when == "always":
                store(*given[:4], _next_slots(given[4]), *given[5:], **named)
            else:
                store(*given, **named)
                last[:] = [(given, named)]

        def attend_then_move(**named: Any) -> None:
            attend(**named)
            if last and last[0][0][0].shape[0] > 1:
                given, more = last[0]
                store(*given[:4], _next_slots(given[4]), *given[5:], **more)

        cpu_attn.ops.cpu_attn_reshape_and_cache = store_off
        if when == "decode":
            cpu_attn.ops.cpu_attention_with_kv_cache = attend_then_move

        def undo() -> None:
            cpu_attn.ops.cpu_attn_reshape_and_cache = store
            cpu_attn.ops.cpu_attention_with_kv_cache = attend

        self._undo = undo

    def foreign_embeddings(self, kind: str) -> None:
        """`shifted`: each token has the next one's, as with another tokenizer's order; `random`: another training's.

        Random ones have the mean and deviation of the model's own.
        """
        import torch
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        embeddings = self._model.embed_tokens
        kept = embeddings.weight.data.clone()
        if kind == "shifted":
            foreign = torch.roll(kept, 1, dims=0)
        else:
            numbers = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0))
            foreign = (numbers * kept.float().std() + kept.float().mean()).to(kept.dtype)

        def put(weight: Any) -> None:
            embeddings.weight.data.copy_(weight)
            dispatch_cpu_unquantized_gemm(embeddings, remove_weight=False)  # it is the output layer too

        put(foreign)
        self._undo = lambda: put(kept)

    @property
    def _model(self) -> Any:
        return self.model_runner.model.model


def _next_slots(slots: Any) -> Any:
    """Padding is below zero and stays."""
    import torch

    return torch.where(slots >= 0, slots + 1, slots)


def _columns(layer: Any, part: str) -> slice:
    """Return the columns of a fused projection's output that belong to one of its parts."""
    attention = layer.self_attn
    queries, keys = attention.q_size, attention.kv_size
    halves = layer.mlp.down_proj.input_size_per_partition
    return {
        "": slice(None),
        "q": slice(0, queries),
        "k": slice(queries, queries + keys),
        "v": slice(queries + keys, None),
        "gate": slice(0, halves),
        "up": slice(halves, None),
    }[part]


def _scaling(columns: slice, factor: float) -> Callable[[Any, Any, Any], Any]:
    def hook(_module: Any, _given: Any, output: Any) -> Any:
        values, *rest = output
        values = values.clone()
        values[..., columns] *= factor
        return (values, *rest)

    return hook
