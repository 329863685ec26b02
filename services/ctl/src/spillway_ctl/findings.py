"""The conclusions of `spillway doctor` and `helm test` from the answers of a gateway and its engines. Pure.

Whatever an earlier release does not say is `not checked`, with the reason. Counters are judged by their growth over a
window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spillway_ctl.evidence import (
    NO_REPORT,
    EngineReading,
    Exposition,
    Finding,
    GatewayReading,
    Verdict,
    at,
    by_process,
    mappings,
)
from spillway_ctl.role_findings import roles
from spillway_ctl.tier_findings import missed, shared_tiers

SKEW_SECONDS_MAX = 2.0  # HTTP tells whole seconds
EVENT_LAG_SECONDS_MAX = 2.0
MISSING_SHARE_MAX = 0.15  # as SpillwayPrefixesLost
EXPECTED_TOKENS_MIN = 5_000.0  # within the window; fewer say nothing
ENGINE_CORE = "EngineCore"
_SIZES = ("tensorParallelSize", "pipelineParallelSize", "dataParallelSize")


def judge(gateway: GatewayReading | None, engines: Sequence[EngineReading], window_seconds: float) -> list[Finding]:
    """gateway: None if none was named."""
    findings = [*_gateway(gateway)]
    for engine in engines:
        if engine.problem is not None:
            findings.append(
                Finding(
                    "answers",
                    engine.name,
                    Verdict.FAILED,
                    engine.problem,
                    "look at its log; if it is only out of reach from here, forward its port and give --engine",
                )
            )
            continue
        findings += [
            _versions(engine, gateway),
            _devices(engine),
            _memory_lock(engine),
            *_settings(engine),
            _patches(engine),
            _copies(engine, window_seconds),
            *_node_tier(engine),
            *shared_tiers(engine, window_seconds),
            _clock(engine.name, engine.skew_seconds),
            _events(engine, gateway, window_seconds),
        ]
    if not engines:
        findings.append(
            Finding("engines", "gateway", Verdict.NOT_CHECKED, "no engine is known", "give --engine, once for each")
        )
    return [*findings, *_together(gateway, engines, window_seconds)]


def _gateway(gateway: GatewayReading | None) -> Iterator[Finding]:
    if gateway is None:
        yield Finding("version", "gateway", Verdict.NOT_CHECKED, "no gateway was named", "give --gateway")
        return
    if gateway.problem is not None:
        yield Finding("answers", "gateway", Verdict.FAILED, gateway.problem, "look at its log, and at --gateway")
        return
    version = (gateway.config or {}).get("version")
    yield (
        Finding("version", "gateway", Verdict.OK, f"spillway-gateway {version}")
        if version
        else Finding("version", "gateway", Verdict.NOT_CHECKED, "this release of the gateway does not say it")
    )
    yield _clock("gateway", gateway.skew_seconds)


def _versions(engine: EngineReading, gateway: GatewayReading | None) -> Finding:
    vllm, connector = engine.held("vllm_version"), engine.held("connector_version")
    served, own = engine.vllm_version, (engine.config or {}).get("version")
    found = f"vLLM {served or '?'}, spillway-engine {own or '?'}"
    if not vllm and not connector:
        return Finding("version", engine.name, Verdict.NOT_CHECKED, f"{found} in the API server; {NO_REPORT}")
    found += f"; {by_process(vllm, 'vLLM ')}; {by_process(connector, 'connector ')}"
    different = {*vllm.values(), *([served] if served else [])}
    if len(different) > 1 or len(set(connector.values())) > 1:
        return Finding("version", engine.name, Verdict.FAILED, found, "its processes differ: restart the engine")
    other = None if gateway is None else (gateway.config or {}).get("version")
    if other and own and other != own:
        change = f"the gateway is {other}: upgrade the older of the two"
        return Finding("version", engine.name, Verdict.WARNING, found, change)
    return Finding("version", engine.name, Verdict.OK, found)


def _devices(engine: EngineReading) -> Finding:
    devices = engine.held("device")
    sizes = {key: engine.setting(key) for key in _SIZES}
    if not devices:
        return Finding("devices", engine.name, Verdict.NOT_CHECKED, NO_REPORT)
    found = by_process(devices)
    if len(set(devices.values())) > 1:
        return Finding("devices", engine.name, Verdict.WARNING, found, "ranks wait for the slowest: give equal devices")
    given = {key: size for key, size in sizes.items() if isinstance(size, int) and (size != 1 or key == _SIZES[0])}
    asked = math.prod(given.values())
    if "tensorParallelSize" in given and asked != len(devices):
        named = ", ".join(f"{key} is {size}" for key, size in given.items())
        change = f"{named}: {asked} workers should report; restart the engine"
        return Finding("devices", engine.name, Verdict.FAILED, found, change)
    return Finding("devices", engine.name, Verdict.OK, found)


def _memory_lock(engine: EngineReading) -> Finding:
    limits, transports = engine.held("memory_lock_bytes"), engine.held("transport")
    if not limits:
        return Finding("memory lock", engine.name, Verdict.NOT_CHECKED, NO_REPORT)
    found = f"limit in bytes {by_process(limits)}"
    if set(transports.values()) <= {"cpu"}:
        return Finding("memory lock", engine.name, Verdict.OK, f"{found}; not needed on the CPU platform")
    pinned = (engine.after or Exposition("")).series("spillway_host_memory_pinned")
    if not pinned:
        return Finding("memory lock", engine.name, Verdict.NOT_CHECKED, f"{found}; whether it is used is not said")
    methods = sorted({labels.get("method", "?") for labels, value in pinned if value})
    if not methods:
        change = (
            "raise the memlock limit of the container runtime, or set engine.accelerator.lockMemory: true; "
            "see SpillwayHostMemoryNotPinned"
        )
        return Finding("memory lock", engine.name, Verdict.WARNING, f"{found}; the CPU tier is not pinned", change)
    return Finding("memory lock", engine.name, Verdict.OK, f"{found}; pinned by {', '.join(methods)}")


@dataclass(frozen=True)
class _Setting:
    """A setting that processes of an engine report.

    Attributes:
        expected: Returns the value in the engine's configuration; None: any value is right, or the engine names none.
    """

    name: str
    held_as: str
    expected: Callable[[EngineReading], str | None]
    process: str = ""  # which must hold it; empty: EngineCore and workers
    on_difference: Verdict = Verdict.FAILED
    change: str = "the engine does not run as it was started: restart it, and report it if it stays"


def _plain(*path: str) -> Callable[[EngineReading], str | None]:
    def expected(engine: EngineReading) -> str | None:
        value = engine.setting(*path)
        return None if value is None else str(value)

    return expected


def _cpu_chunks(engine: EngineReading) -> str | None:
    own = "shared" not in engine.held("node_tier").values()
    chunks = at(engine.config or {}, "memory", "cpu_chunks" if own else "node_tier_chunks")
    return None if chunks is None else str(chunks)


def _row_bytes(engine: EngineReading) -> str | None:
    row = at(engine.config or {}, "memory", "cpu_row_bytes")
    return None if row is None else str(row)


def _block_tokens(engine: EngineReading) -> str | None:
    tokens = at(engine.config or {}, "memory", "block_tokens")
    return _plain("blockSize")(engine) if tokens is None else str(tokens)


def _chunk_tokens(engine: EngineReading) -> str | None:
    per_chunk, held = engine.setting("offload", "blocksPerChunk"), engine.held("block_tokens", ENGINE_CORE)
    block = next(iter(held.values()), None)
    return str(per_chunk * int(block)) if isinstance(per_chunk, int) and block and block.isdigit() else None


def _tiers(engine: EngineReading) -> str | None:
    own = engine.setting("offload", "sharedTier", "type")
    if own is None or engine.held("not_shared"):
        return None
    below = engine.setting("offload", "sharedTier", "below", "type")
    own = own if below in (None, "none") else f"{own}>{below}"
    others = [str(tier.get("type")) for tier in mappings(engine.setting("offload", "extraTiers"))]
    return ",".join([*([] if own == "none" else [str(own)]), *others]) or "none"


def _transport(engine: EngineReading) -> str | None:
    asked = engine.setting("offload", "transport")
    return None if asked in (None, "auto") else str(asked)


def _copy_path(engine: EngineReading) -> str | None:
    asked = engine.setting("offload", "batchMemcpy")
    if set(engine.held("transport").values()) <= {"cpu"} or asked not in ("on", "off"):
        return None
    return "batch" if asked == "on" else "loop"


_SETTINGS = (
    _Setting("CPU blocks", "cpu_blocks", _cpu_chunks),
    _Setting(
        "block size",
        "block_tokens",
        _block_tokens,
        ENGINE_CORE,
        Verdict.WARNING,
        "vLLM chose another one for this model: set blockSize to it, so that memory is computed with it",
    ),
    _Setting("chunk size", "chunk_tokens", _chunk_tokens, ENGINE_CORE),
    _Setting(
        "row of the CPU tier",
        "chunk_bytes",
        _row_bytes,
        on_difference=Verdict.WARNING,
        change="vLLM makes other KV groups of this model's layers: set engine.model.shape so that memory is computed "
        "with them, or size the tier by cpuBytes",
    ),
    _Setting("shared tiers", "shared_tiers", _tiers, ENGINE_CORE),
    _Setting("generatedTokens", "generated_tokens", _plain("offload", "generatedTokens"), ENGINE_CORE),
    _Setting("copy transport", "transport", _transport),
    _Setting("batchMemcpy", "copy_path", _copy_path),
    _Setting("maxLength", "max_model_len", _plain("model", "maxLength"), ENGINE_CORE),
    _Setting("device blocks", "device_blocks", _plain("deviceBlocks"), ENGINE_CORE),
    _Setting("prefix caching", "prefix_caching", lambda engine: "on", ENGINE_CORE),
)


def _settings(engine: EngineReading) -> Iterator[Finding]:
    """One line for each setting, from the processes that obey it."""
    if engine.config is not None and engine.setting("offload", "enabled") is False:
        yield Finding("settings", engine.name, Verdict.NOT_CHECKED, "offload is off: no process has any of them")
        return
    if not any(engine.held(setting.held_as) for setting in _SETTINGS):
        yield Finding("settings", engine.name, Verdict.NOT_CHECKED, NO_REPORT)
        return
    for setting in _SETTINGS:
        held = engine.held(setting.held_as, setting.process)
        if not held:
            yield Finding(setting.name, engine.name, Verdict.NOT_CHECKED, "this release of the engine does not say it")
            continue
        expected, found = setting.expected(engine), by_process(held)
        if expected is not None and any(value != expected for value in held.values()):
            found = f"{found}; started with {expected}"
            yield Finding(setting.name, engine.name, setting.on_difference, found, setting.change)
        elif len(set(held.values())) > 1:
            yield Finding(setting.name, engine.name, Verdict.FAILED, found, "its processes differ: restart the engine")
        else:
            yield Finding(setting.name, engine.name, Verdict.OK, found)


def _patches(engine: EngineReading) -> Finding:
    """List the functions of vLLM that its processes have replaced: docs/versions.md says what each does."""
    held = engine.held("vllm_patches")
    if not held:
        return Finding("patches of vLLM", engine.name, Verdict.NOT_CHECKED, NO_REPORT)
    return Finding("patches of vLLM", engine.name, Verdict.OK, by_process(held))


def _copies(engine: EngineReading, window_seconds: float) -> Finding:
    if engine.after is None:
        return Finding("device copies", engine.name, Verdict.NOT_CHECKED, "it shows no /metrics")
    now, ever = engine.growth("spillway_device_copy_failures_total")
    found = f"{now:.0f} failed within {window_seconds:.0f} s, {ever:.0f} since the start"
    if now:
        change = "requests are recomputed; look at the driver's log, see SpillwayDeviceCopyFailures"
        return Finding("device copies", engine.name, Verdict.FAILED, found, change)
    return Finding("device copies", engine.name, Verdict.OK, found)


def _node_tier(engine: EngineReading) -> Iterator[Finding]:
    """Whether the engine uses the CPU tier of its node, if it is to use one."""
    if engine.setting("offload", "nodeTier") is None or engine.setting("offload", "enabled") is False:
        return
    held = engine.held("node_tier", ENGINE_CORE)
    if not held:
        yield Finding("node's tier", engine.name, Verdict.NOT_CHECKED, NO_REPORT)
    elif any(value == 0 for _, value in (engine.after or Exposition("")).series("spillway_cpu_tier_joined")):
        change = "its log has the reason, see SpillwayNodeTierLeft"
        yield Finding("node's tier", engine.name, Verdict.WARNING, "left: it has no CPU tier", change)
    elif set(held.values()) == {"shared"}:
        yield Finding("node's tier", engine.name, Verdict.OK, "used")
    else:
        change = "its log has the reason, and so has that of the node-tier pod on its node; then restart the engine"
        yield Finding("node's tier", engine.name, Verdict.WARNING, "not used: it has a CPU tier of its own", change)


def _clock(where: str, skew_seconds: float | None) -> Finding:
    if skew_seconds is None:
        return Finding("clock", where, Verdict.NOT_CHECKED, "its answers carry no date")
    found = "within a second of this one" if abs(skew_seconds) < 1 else f"{skew_seconds:+.0f} s beside this one"
    if abs(skew_seconds) > SKEW_SECONDS_MAX:
        change = "synchronise the nodes' clocks (chrony, NTP): ages of blocks and the times of logs rely on them"
        return Finding("clock", where, Verdict.WARNING, found, change)
    return Finding("clock", where, Verdict.OK, found)


def _events(engine: EngineReading, gateway: GatewayReading | None, window_seconds: float) -> Finding:
    name = "event stream"
    if engine.setting("kvEvents", "enabled") is False:
        return Finding(name, engine.name, Verdict.NOT_CHECKED, "kvEvents.enabled is off")
    if gateway is None or gateway.after is None:
        return Finding(name, engine.name, Verdict.NOT_CHECKED, "no gateway could be asked")
    routed = engine.routed_names
    connected = {one: gateway.after.total("spillway_gateway_events_connected", engine=one) for one in routed}
    if all(value is None for value in connected.values()):
        return Finding(name, engine.name, Verdict.NOT_CHECKED, "the gateway does not name this engine")
    silent = [one for one, value in connected.items() if not value]
    if silent:
        change = "open kvEvents.port and kvEvents.replayPort from gateway to engine; see SpillwayEventsLost"
        found = "not followed by the gateway"
        if len(routed) > 1:
            change = (
                f"{change}; rank r uses both ports + r, and the gateway's dataParallelRanks has to be {len(routed)}"
            )
            found = f"{', '.join(silent)} {found}"
        return Finding(name, engine.name, Verdict.FAILED, found, change)

    grown = {
        series: [sum(each) for each in zip(*(gateway.growth(series, engine=one) for one in routed), strict=True)]
        for series in ("spillway_gateway_event_gaps_total", "spillway_gateway_events_undecodable_total")
    }
    (gaps, gaps_ever), (broken, broken_ever) = grown.values()
    lag = engine.event_lag_seconds
    late = f"lag not measured ({engine.request_problem or 'no request'})"
    if lag is not None:
        late = f"lag {lag:.2f} s" if math.isfinite(lag) else "no event of a request came"
    found = (
        f"connected, {late}; within {window_seconds:.0f} s {gaps:.0f} gaps and {broken:.0f} undecodable "
        f"({gaps_ever:.0f} and {broken_ever:.0f} since the start)"
    )
    if broken:
        change = "engine and gateway are of different releases: upgrade the older one"
        return Finding(name, engine.name, Verdict.FAILED, found, change)
    if gaps or (lag is not None and lag > EVENT_LAG_SECONDS_MAX):
        change = "prefixes are found later: look at the network between them, and at the gateway's CPU"
        return Finding(name, engine.name, Verdict.WARNING, found, change)
    return Finding(name, engine.name, Verdict.OK, found)


def _together(
    gateway: GatewayReading | None, engines: Sequence[EngineReading], window_seconds: float
) -> Iterator[Finding]:
    """Findings about what engines and gateway must agree on, model by model."""
    answering = [engine for engine in engines if engine.problem is None]
    for model in dict.fromkeys(engine.model for engine in answering):
        of_model = [engine for engine in answering if engine.model == model]
        versions = {engine.name: engine.vllm_version for engine in of_model if engine.vllm_version}
        if len(set(versions.values())) > 1:
            yield Finding(
                "vLLM of all engines",
                model,
                Verdict.WARNING,
                by_process(versions),
                "engines of two versions share no blocks: finish the upgrade",
            )
        yield _tokenizers(model, of_model)
        yield _gateway_tokenizer(model, gateway)
        yield _expected_prefixes(model, gateway, of_model, window_seconds)
        yield from roles(model, gateway, of_model, window_seconds)


def _tokenizers(model: str, engines: Sequence[EngineReading]) -> Finding:
    name = "tokenizer of engines"
    asked = {engine.name: tuple(engine.tokens) for engine in engines if engine.tokens is not None}
    if not asked:
        return Finding(name, model, Verdict.NOT_CHECKED, "no engine answers /tokenize")
    if len(set(asked.values())) > 1:
        found = ", ".join(f"{engine} {len(tokens)} tokens" for engine, tokens in asked.items())
        change = "engines of one model serve different tokenizers: give them one model folder"
        return Finding(name, model, Verdict.FAILED, f"one text differs: {found}", change)
    return Finding(name, model, Verdict.OK, f"{len(asked)} of {len(engines)} engines split a text alike")


def _gateway_tokenizer(model: str, gateway: GatewayReading | None) -> Finding:
    name = "tokenizer of the gateway"
    if gateway is None or gateway.after is None:
        return Finding(name, model, Verdict.NOT_CHECKED, "no gateway could be asked")
    usable = gateway.after.total("spillway_gateway_tokenizer_usable", model=model)
    models = {str(each.get("name")): each for each in mappings(at(gateway.config or {}, "settings", "models"))}
    if usable is None:
        why = "none is configured: prompts are matched as text"
        if models.get(model, {}).get("tokenizer"):
            why = "the gateway does not say whether it agrees"
        return Finding(name, model, Verdict.NOT_CHECKED, why)
    if not usable:
        change = "let model.tokenizer be the folder that the engines serve; see SpillwayTokenizerUnusable"
        return Finding(name, model, Verdict.WARNING, "it does not load, or splits text unlike the engines", change)
    return Finding(name, model, Verdict.OK, "it agrees with every engine that the gateway has asked")


def _expected_prefixes(
    model: str, gateway: GatewayReading | None, engines: Sequence[EngineReading], window_seconds: float
) -> Finding:
    """Whether requests find the blocks that they were routed for; if not, in which tier these were expected and why
    they are not there."""
    name = "expected prefixes"
    if gateway is None or gateway.after is None:
        return Finding(name, model, Verdict.NOT_CHECKED, "no gateway could be asked")
    expected, _ = gateway.growth("spillway_gateway_predicted_cached_tokens_total", model=model)
    if expected < EXPECTED_TOKENS_MIN:
        found = f"requests were routed for {expected:.0f} cached tokens within {window_seconds:.0f} s: too few to judge"
        return Finding(name, model, Verdict.NOT_CHECKED, found)
    series = "spillway_gateway_missing_cached_tokens_total"
    missing = {tier: gateway.growth(series, model=model, tier=tier)[0] for tier in ("device", "cpu", "shared")}
    lost = sum(missing.values()) / expected
    shares = ", ".join(f"{tier} {tokens / expected:.0%}" for tier, tokens in missing.items())
    found = f"{lost:.0%} of {expected:.0f} cached tokens were not there at their request's turn, by tier: {shares}"
    if lost <= MISSING_SHARE_MAX:
        return Finding(name, model, Verdict.OK, found)
    if missing["shared"] >= max(missing.values()):
        found = f"{found}; its misses: {missed(engines)}"
        change = "a faster or larger shared tier, or sharedTier.type: none; see SpillwayPrefixesLost"
    else:
        change = "more CPU blocks (offload.cpuBytes), or the node's memory to fewer engines; see SpillwayPrefixesLost"
        if not gateway.growth("spillway_gateway_session_choices_total", model=model)[1]:
            change = f"{change}; no request names a session: let clients send x-session-id"
    return Finding(name, model, Verdict.WARNING, found, change)
