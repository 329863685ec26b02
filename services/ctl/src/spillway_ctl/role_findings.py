"""The conclusions of `spillway doctor` about a model whose engines compute prompts and answer apart. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spillway_ctl.evidence import EngineReading, Finding, GatewayReading, Verdict, at, by_process
from spillway_settings.roles import EngineRole, missing_role

CHECK = "prefill and decode apart"
# Two engines load what the other one has, or read its blocks, only if these are equal.
_EQUAL = (
    ("blockSize",),
    ("tensorParallelSize",),
    ("pipelineParallelSize",),
    ("model", "dtype"),
    ("model", "kvCacheDtype"),
)
_CHUNKS = ("offload", "blocksPerChunk")
_CONNECTOR = ("kvTransfer", "connector")
# Why requests took one leg, by the gateway's count, and what to change.
_ONE_LEG = {
    "no_prefill_engine": "no prefill engine takes requests: look at their logs",
    "no_decode_engine": "no decode engine takes requests: look at their logs",
    "no_common_store": "give both groups one store on one node (nodeSelector), Redis or S3, or handOver: connector",
    "no_transfer": "set kvTransfer.connector to NixlConnector, or MooncakeConnectorV1 with vllm-ascend, on all engines",
    "body": "nothing if clients need echo, prompt_logprobs or prompt_embeds; with handOver: connector, let them ask "
    "for one choice without beams, and for no longer answer than the model's length leaves",
    "text": "set model.tokenizer: volume if it is none: only prompts whose tokens the gateway knows are handed over",
    "prefill_failed": "look at the prefill engines' logs",
    "prefill_refused": "look at the prefill engines' logs",
    "prefill_late": "more prefill engines, or a longer gateway.disaggregation.prefillSecondsMax",
}


def roles(
    model: str, gateway: GatewayReading | None, engines: Sequence[EngineReading], window_seconds: float
) -> Iterator[Finding]:
    """Yield what is wrong with the engines' roles; nothing if they have none. engines: those of the model that
    answer."""
    if gateway is None:
        return
    given = gateway.roles(model)
    if set(given.values()) <= {EngineRole.BOTH.value}:
        return
    known = [EngineRole(role) for role in given.values() if role in set(EngineRole)]
    lack = missing_role(known)
    if lack is not None:
        found, _, change = lack.partition("; ")
        yield Finding(CHECK, model, Verdict.FAILED, f"the model {found}", change)
        return
    asked = at(gateway.config or {}, "settings", "disaggregation")
    by_connector = at(asked, "handOver") == "connector"
    for path in (*_EQUAL, _CONNECTOR if by_connector else _CHUNKS):
        values = {engine.name: str(engine.setting(*path)) for engine in engines if engine.config is not None}
        if len(set(values.values())) > 1:
            yield Finding(
                CHECK,
                model,
                Verdict.FAILED,
                f"{'.'.join(path)} differs: {by_process(values)}",
                "make them equal: no engine loads what the other one has",
            )
            return
    producers = [
        engine.name
        for engine in engines
        if given.get(engine.name) == EngineRole.PREFILL and engine.setting("kvTransfer", "role") == "kv_producer"
    ]
    if producers and at(asked, "strictRoles") is False and at(asked, "mode") != "always":
        found = (
            f"{', '.join(producers)}: kv_producer, but prefill engines answer whole requests too, if that costs less"
        )
        change = "gateway.disaggregation.strictRoles: true, unless these engines answer as fast as others"
        yield Finding(CHECK, model, Verdict.WARNING, found, change)
        return
    series = "spillway_gateway_legs_total"
    grown = {why: gateway.growth(series, model=model, decision="one", reason=why)[0] for why in _ONE_LEG}
    if why := max(grown, key=lambda each: grown[each]) if any(grown.values()) else None:
        found = f"within {window_seconds:.0f} s {grown[why]:.0f} requests took one leg ({why})"
        yield Finding(CHECK, model, Verdict.WARNING, found, _ONE_LEG[why])
        return
    counted = ", ".join(f"{sum(role is each for each in known)} {role.value}" for role in EngineRole if role in known)
    yield Finding(CHECK, model, Verdict.OK, counted)
