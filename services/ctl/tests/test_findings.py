"""The conclusions from what gateway and engines report: one broken thing at a time, and releases that report less."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from spillway_ctl.evidence import EngineReading, Exposition, Finding, GatewayReading, Verdict
from spillway_ctl.findings import judge

CONFIG: dict[str, Any] = {
    "settings": {
        "name": "engine-0",
        "blockSize": 128,
        "deviceBlocks": 40,
        "tensorParallelSize": 2,
        "model": {"maxLength": 2048},
        "kvEvents": {"enabled": True},
        "offload": {
            "enabled": True,
            "blocksPerChunk": 2,
            "generatedTokens": "on",
            "batchMemcpy": "auto",
            "transport": "auto",
            "extraTiers": [],
            "sharedTier": {"type": "redis", "redis": {"url": "redis://cache:6379/0"}},
        },
    },
    "servedName": "m",
    "memory": {"cpu_chunks": 60, "cpu_row_bytes": 4096, "bytes_per_token": 1000},
    "version": "0.1.0",
}
CORE = {
    "vllm_version": "0.23.0",
    "connector_version": "0.1.0",
    "cpu_blocks": "60",
    "block_tokens": "128",
    "chunk_tokens": "256",
    "shared_tiers": "redis",
    "generated_tokens": "on",
    "max_model_len": "2048",
    "device_blocks": "40",
    "prefix_caching": "on",
    "vllm_patches": "weight-changes sleeps",
}
WORKER = {
    "vllm_version": "0.23.0",
    "connector_version": "0.1.0",
    "cpu_blocks": "60",
    "chunk_bytes": "4096",
    "transport": "npu",
    "copy_path": "batch",
    "device": "Ascend910B3",
    "memory_lock_bytes": "unlimited",
    "vllm_patches": "none",
}
PAGE = """\
spillway_host_memory_pinned{engine="0",method="acl"} 1.0
spillway_device_copy_failures_total{direction="load"} 4.0
spillway_tier_ready{tier="redis"} 1.0
spillway_tier_breaker_open{tier="redis",operation="load"} 0.0
spillway_tier_weights_changed{tier="redis"} 0.0
spillway_tier_failures_total{tier="redis",operation="load",reason="connect"} 7.0
"""
CONNECTED = 'spillway_gateway_events_connected{engine="engine-0",model="m"} 1.0'
GATEWAY_PAGE = f"""\
# HELP something else
{CONNECTED}
spillway_gateway_event_gaps_total{{engine="engine-0"}} 3.0
spillway_gateway_events_undecodable_total{{engine="engine-0"}} 0.0
spillway_gateway_tokenizer_usable{{model="m"}} 1.0
"""


def held(core: dict[str, str] = CORE, *workers: dict[str, str]) -> str:
    processes = {"EngineCore": core, **{f"worker-{rank}": each for rank, each in enumerate(workers or (WORKER,) * 2)}}
    return "".join(
        f'spillway_process_setting{{process="{process}",setting="{setting}",value="{value}"}} 1.0\n'
        for process, settings in processes.items()
        for setting, value in settings.items()
    )


def engine(page: str = "", before: str | None = None, settings: str | None = None, **fields: Any) -> EngineReading:
    """A healthy engine whose counters stand still; with another page if one is given."""
    shown = page or PAGE
    after = shown + (held() if settings is None else settings)
    healthy = {
        "config": copy.deepcopy(CONFIG),
        "vllm_version": "0.23.0",
        "before": Exposition(shown if before is None else before),
        "after": Exposition(after),
        "skew_seconds": 0.0,
        "tokens": [1, 2, 3],
        "event_lag_seconds": 0.05,
    }
    return EngineReading("engine-0", "http://127.0.0.1:8100", **{**healthy, **fields})


def gateway(page: str = GATEWAY_PAGE, before: str = GATEWAY_PAGE, **fields: Any) -> GatewayReading:
    config = {"settings": {"models": [{"name": "m", "tokenizer": "/m"}]}, "version": "0.1.0"}
    said = {"config": config, "before": Exposition(before), "after": Exposition(page), "skew_seconds": 0.0}
    return GatewayReading("http://127.0.0.1:8001", **{**said, **fields})


def found(check: str, *engines: EngineReading, front: GatewayReading | None = None) -> Finding:
    """The one finding of this check about an engine, or about all engines together."""
    findings = judge(front or gateway(), engines, 5.0)
    [finding] = [each for each in findings if each.check == check and each.where != "gateway"]
    return finding


def changed(*path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return config


def test_an_engine_that_cannot_tell_its_weights_says_why_it_shares_nothing() -> None:
    why = r"""model '/m': it holds no file of weights, so its KV must not be shared; name \"it\" """.strip()
    silent = engine(
        PAGE.replace("spillway_tier", "x"), settings=held({**CORE, "shared_tiers": "none", "not_shared": why})
    )
    finding = found("shared tier", silent)
    assert (finding.verdict, finding.found) == (Verdict.FAILED, f"not used: {why}".replace("\\", ""))
    assert "weightsVersion" in finding.change
    assert found("shared tiers", silent).verdict == Verdict.OK


def test_an_engine_with_a_tier_of_its_own_in_place_of_the_nodes_is_found() -> None:
    config = changed("settings", "offload", "nodeTier", value={"bytes": 1 << 36, "path": "/node"})
    config["memory"]["node_tier_chunks"] = 4096
    private, shared = (
        engine(settings=held({**CORE, **own, "node_tier": use}, {**WORKER, **own}), config=config)
        for use, own in (("private", {}), ("shared", {"cpu_blocks": "4096"}))
    )
    finding = found("node's tier", private)
    assert (finding.verdict, finding.found) == (Verdict.WARNING, "not used: it has a CPU tier of its own")
    assert found("CPU blocks", private).verdict == Verdict.OK
    assert found("node's tier", shared).verdict == Verdict.OK
    assert found("CPU blocks", shared).verdict == Verdict.OK
    page = PAGE + 'spillway_cpu_tier_joined{engine="0"} 0.0\n'
    left = engine(page, settings=held({**CORE, "node_tier": "shared"}, WORKER), config=config)
    assert found("node's tier", left).found == "left: it has no CPU tier"
    assert found("node's tier", engine(config=config)).verdict == Verdict.NOT_CHECKED


def test_a_healthy_release_has_no_failure_whatever_its_counters_were_once() -> None:
    findings = judge(gateway(routed()), [engine()], 5.0)
    assert {each.verdict for each in findings} == {Verdict.OK}
    assert "7 since the start" in found("shared tier", engine()).found
    assert "3 and 0 since the start" in found("event stream", engine()).found
    assert all(not each.change for each in findings)


@pytest.mark.parametrize(
    ("check", "settings", "verdict", "shows"),
    [
        ("CPU blocks", held({**CORE, "cpu_blocks": "50"}), Verdict.FAILED, "EngineCore 50"),
        ("CPU blocks", held(CORE, WORKER, {**WORKER, "cpu_blocks": "50"}), Verdict.FAILED, "worker-1 50"),
        ("chunk size", held({**CORE, "chunk_tokens": "128"}), Verdict.FAILED, "started with 256"),
        ("row of the CPU tier", held(CORE, {**WORKER, "chunk_bytes": "8192"}), Verdict.WARNING, "started with 4096"),
        ("block size", held({**CORE, "block_tokens": "144", "chunk_tokens": "288"}), Verdict.WARNING, "144"),
        ("shared tiers", held({**CORE, "shared_tiers": "none"}), Verdict.FAILED, "started with redis"),
        ("generatedTokens", held({**CORE, "generated_tokens": "off"}), Verdict.FAILED, "off"),
        ("maxLength", held({**CORE, "max_model_len": "1024"}), Verdict.FAILED, "1024"),
        ("prefix caching", held({**CORE, "prefix_caching": "off"}), Verdict.FAILED, "off"),
        ("batchMemcpy", held(CORE, WORKER, {**WORKER, "copy_path": "loop"}), Verdict.FAILED, "worker-1 loop"),
        ("devices", held(CORE, WORKER), Verdict.FAILED, "Ascend910B3"),
        ("devices", held(CORE, WORKER, {**WORKER, "device": "Ascend910B4"}), Verdict.WARNING, "worker-1 Ascend910B4"),
        ("version", held({**CORE, "vllm_version": "0.32.0"}), Verdict.FAILED, "EngineCore vLLM 0.32.0"),
        ("version", held(CORE, WORKER, {**WORKER, "connector_version": "0.2.0"}), Verdict.FAILED, "0.2.0"),
    ],
)
def test_what_a_process_holds_is_compared_with_what_was_asked_for(
    check: str, settings: str, verdict: Verdict, shows: str
) -> None:
    finding = found(check, engine(settings=settings))
    assert finding.verdict is verdict and shows in finding.found and finding.change


@pytest.mark.parametrize(("asked", "verdict"), [("on", Verdict.OK), ("off", Verdict.FAILED), ("auto", Verdict.OK)])
def test_batch_memcpy_is_what_the_workers_resolved(asked: str, verdict: Verdict) -> None:
    config = changed("settings", "offload", "batchMemcpy", value=asked)
    assert found("batchMemcpy", engine(config=config)).verdict is verdict


@pytest.mark.parametrize(
    ("change", "shows"),
    [
        (('spillway_tier_ready{tier="redis"} 1.0', 'spillway_tier_ready{tier="redis"} 0.0'), "cannot be used"),
        (('operation="load"} 0.0', 'operation="load"} 1.0'), "breaker of load is open"),
        (('weights_changed{tier="redis"} 0.0', 'weights_changed{tier="redis"} 1.0'), "weights"),
    ],
)
def test_a_tier_that_is_away_is_named_with_its_address_and_the_remedy(change: tuple[str, str], shows: str) -> None:
    page = PAGE.replace(*change)
    assert page != PAGE
    finding = found("shared tier", engine(page))
    assert finding.verdict is Verdict.FAILED and shows in finding.found and finding.change
    assert "redis://cache:6379/0" in finding.found or "weights" in finding.found


def test_failures_count_while_they_grow() -> None:
    tier = found("shared tier", engine(before=PAGE.replace('"connect"} 7.0', '"connect"} 5.0')))
    copies = found("device copies", engine(before=PAGE.replace("} 4.0", "} 3.0")))
    assert tier.verdict is copies.verdict is Verdict.FAILED
    assert (
        "2 operations failed within 5 s: nothing accepts" in tier.found
        and "(load connect)" in tier.found
        and "1 failed" in copies.found
    )


def test_a_counter_that_began_anew_has_not_grown() -> None:
    assert found("shared tier", engine(before=PAGE.replace('"connect"} 7.0', '"connect"} 900.0'))).verdict is Verdict.OK


def test_memory_that_is_not_pinned_is_a_warning_where_a_device_needs_it() -> None:
    page = PAGE.replace('method="acl"} 1.0', 'method="none"} 0.0')
    finding = found("memory lock", engine(page))
    assert finding.verdict is Verdict.WARNING and "memlock" in finding.change
    on_cpu = {**WORKER, "transport": "cpu", "memory_lock_bytes": "65536"}
    assert found("memory lock", engine(page, settings=held(CORE, on_cpu, on_cpu))).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("page", "fields", "verdict"),
    [
        (GATEWAY_PAGE.replace(CONNECTED, CONNECTED.replace("1.0", "0.0")), {}, Verdict.FAILED),
        (GATEWAY_PAGE.replace("} 3.0", "} 4.0"), {}, Verdict.WARNING),
        (GATEWAY_PAGE.replace('engine="engine-0"} 0.0', 'engine="engine-0"} 1.0'), {}, Verdict.FAILED),
        (GATEWAY_PAGE, {"event_lag_seconds": 5.0}, Verdict.WARNING),
        (GATEWAY_PAGE, {"event_lag_seconds": None, "request_problem": "--no-requests"}, Verdict.OK),
        (GATEWAY_PAGE.replace("engine-0", "engine-7"), {}, Verdict.NOT_CHECKED),
    ],
)
def test_an_event_stream_is_connected_whole_and_soon(page: str, fields: dict[str, Any], verdict: Verdict) -> None:
    assert found("event stream", engine(**fields), front=gateway(page)).verdict is verdict


@pytest.mark.parametrize(
    ("skew", "verdict"),
    [(0.0, Verdict.OK), (-90.0, Verdict.WARNING), (3.0, Verdict.WARNING), (None, Verdict.NOT_CHECKED)],
)
def test_clocks_are_compared_with_this_one(skew: float | None, verdict: Verdict) -> None:
    clocks = [each for each in judge(gateway(), [engine(skew_seconds=skew)], 5.0) if each.check == "clock"]
    assert [(each.where, each.verdict) for each in clocks] == [("gateway", Verdict.OK), ("engine-0", verdict)]


def test_tokenizers_must_agree() -> None:
    other = engine(tokens=[1, 2])
    other.name = "engine-1"
    assert found("tokenizer of engines", engine(), other).verdict is Verdict.FAILED
    page = GATEWAY_PAGE.replace('usable{model="m"} 1.0', 'usable{model="m"} 0.0')
    assert found("tokenizer of the gateway", engine(), front=gateway(page)).verdict is Verdict.WARNING
    assert found("tokenizer of engines", engine(tokens=None)).verdict is Verdict.NOT_CHECKED


def test_releases_that_differ_are_named() -> None:
    newer = gateway(config={"settings": {"models": []}, "version": "0.2.0"})
    away = found("version", engine(), front=GatewayReading("u", problem="away"))
    assert away.verdict is Verdict.OK, "there is no release to compare with"
    finding = next(
        each for each in judge(newer, [engine()], 5.0) if (each.check, each.where) == ("version", "engine-0")
    )
    assert finding.verdict is Verdict.WARNING and "0.2.0" in finding.change
    other = engine(vllm_version="0.32.0", settings=held().replace("0.23.0", "0.32.0"))
    other.name = "engine-1"
    assert found("vLLM of all engines", engine(), other).verdict is Verdict.WARNING


@pytest.mark.parametrize("config", [None, {}, {"settings": {}}, {"settings": {"offload": None}, "servedName": 3}])
@pytest.mark.parametrize("page", [None, Exposition(""), Exposition("not metrics at all\n{}\n 7")])
def test_what_an_earlier_release_does_not_say_is_not_checked(config: Any, page: Exposition | None) -> None:
    bare = EngineReading("engine-0", "u", config=config, before=page, after=page)
    front = GatewayReading("u", config=config, before=page, after=page)
    findings = judge(front, [bare], 5.0)
    unknown = [each for each in findings if each.verdict is Verdict.NOT_CHECKED]
    assert {"version", "devices", "memory lock", "settings", "shared tier", "event stream"} <= {
        each.check for each in unknown
    }
    assert all(each.found for each in unknown)
    assert not any(each.verdict is Verdict.FAILED for each in findings)


def test_offload_that_is_off_has_no_settings_and_no_tier() -> None:
    config = changed("settings", "offload", value={"enabled": False})
    bare = engine(settings="", config=config, before="", page="x 1\n")
    assert found("settings", bare).verdict is Verdict.NOT_CHECKED
    assert found("shared tier", bare).verdict is Verdict.OK


def test_who_does_not_answer_failed() -> None:
    away = EngineReading("engine-0", "u", problem="http://e:8100/health: Connection refused")
    findings = judge(GatewayReading("u", problem="timed out"), [away], 5.0)
    failed = [(each.where, each.found) for each in findings if each.verdict is Verdict.FAILED]
    assert failed == [("gateway", "timed out"), ("engine-0", "http://e:8100/health: Connection refused")]


def test_nothing_to_ask_is_said() -> None:
    assert {each.verdict for each in judge(None, [], 5.0)} == {Verdict.NOT_CHECKED}


def test_labels_with_quotes_and_commas_are_read() -> None:
    page = Exposition('x{a="one, \\"two\\"",b="}"} 2 1700000000000\nx{a="other"} +Inf\n# TYPE x gauge\nx 3e2\n')
    assert page.series("x", a='one, "two"') == [({"a": 'one, "two"', "b": "}"}, 2.0)]
    assert page.total("y") is None


RANKS = changed("settings", "dataParallelSize", value=2)


def of_ranks(*pages: str) -> str:
    """Settings of each data parallel rank's processes, as vLLM labels them."""
    return "".join(page.replace("{process=", f'{{engine="{rank}",process=') for rank, page in enumerate(pages))


def gateway_of_ranks(*connected: int) -> GatewayReading:
    page = GATEWAY_PAGE.replace(CONNECTED, "") + "".join(
        f'spillway_gateway_events_connected{{engine="engine-0/dp{rank}",model="m"}} {value}\n'
        f'spillway_gateway_event_gaps_total{{engine="engine-0/dp{rank}"}} {rank + 1}\n'
        for rank, value in enumerate(connected)
    )
    return gateway(page, page)


def test_processes_of_every_data_parallel_rank_are_expected() -> None:
    whole = engine(settings=of_ranks(held(), held()), config=RANKS)
    devices = found("devices", whole)
    assert devices.verdict is Verdict.OK
    assert "worker-0 of rank 0, worker-0 of rank 1, worker-1 of rank 0, worker-1 of rank 1" in devices.found

    half = found("devices", engine(settings=of_ranks(held()), config=RANKS))
    assert half.verdict is Verdict.FAILED
    assert "tensorParallelSize is 2, dataParallelSize is 2: 4 workers should report" in half.change


def test_a_rank_that_holds_another_setting_is_named() -> None:
    other = of_ranks(held(), held({**CORE, "cpu_blocks": "50", "chunk_tokens": "128"}))
    assert "EngineCore of rank 1 50" in found("CPU blocks", engine(settings=other, config=RANKS)).found
    chunks = found("chunk size", engine(settings=other, config=RANKS))
    assert chunks.verdict is Verdict.FAILED
    assert chunks.found == "EngineCore of rank 0 256, EngineCore of rank 1 128; started with 256"


def test_the_events_of_every_data_parallel_rank_are_followed() -> None:
    reading = engine(settings=of_ranks(held(), held()), config=RANKS)
    followed = found("event stream", reading, front=gateway_of_ranks(1, 1))
    assert followed.verdict is Verdict.OK
    assert "(3 and 0 since the start)" in followed.found

    silent = found("event stream", reading, front=gateway_of_ranks(1, 0))
    assert (silent.verdict, silent.found) == (Verdict.FAILED, "engine-0/dp1 not followed by the gateway")
    unknown = found("event stream", reading, front=gateway_of_ranks(1))
    assert (unknown.verdict, unknown.found) == (Verdict.FAILED, "engine-0/dp1 not followed by the gateway")
    assert "the gateway's dataParallelRanks has to be 2" in unknown.change


def routed(device: int = 0, cpu: int = 0, shared: int = 0, *, expected: int = 100_000, sessions: int = 0) -> str:
    """A gateway's page: missing tokens by tier."""
    missing = {"device": device, "cpu": cpu, "shared": shared}
    series = "spillway_gateway_missing_cached_tokens_total"
    return "".join(
        [
            GATEWAY_PAGE,
            f'spillway_gateway_predicted_cached_tokens_total{{model="m",tier="cpu"}} {expected}\n',
            f'spillway_gateway_session_choices_total{{model="m",outcome="kept"}} {sessions}\n',
            *[f'{series}{{model="m",tier="{tier}"}} {tokens}\n' for tier, tokens in missing.items()],
        ]
    )


def test_prefixes_that_are_gone_before_their_turn_are_named_with_tier_and_remedy() -> None:
    lost = found("expected prefixes", engine(), front=gateway(routed(4_000, 26_000)))
    assert lost.verdict is Verdict.WARNING
    assert "30% of 100000" in lost.found and "device 4%, cpu 26%, shared 0%" in lost.found
    assert "offload.cpuBytes" in lost.change and "x-session-id" in lost.change
    named = found("expected prefixes", engine(), front=gateway(routed(4_000, 26_000, sessions=3)))
    assert "x-session-id" not in named.change


def test_a_shared_tier_that_does_not_load_what_was_expected_says_why() -> None:
    page = PAGE + 'spillway_tier_misses_total{tier="redis",reason="not_worth"} 9.0\n'
    slow = found("expected prefixes", engine(page, before=PAGE), front=gateway(routed(1_000, 2_000, 30_000)))
    assert slow.verdict is Verdict.WARNING and slow.found.endswith("its misses: not_worth (computing it is faster)")
    assert "sharedTier.type: none" in slow.change


@pytest.mark.parametrize(
    ("page", "before", "verdict"),
    [
        (routed(cpu=15_000), GATEWAY_PAGE, Verdict.OK),
        (routed(cpu=15_001), GATEWAY_PAGE, Verdict.WARNING),
        (routed(cpu=90_000), routed(cpu=90_000, expected=20_000), Verdict.OK),  # lost before the window
        (routed(cpu=90_000), routed(cpu=90_000), Verdict.NOT_CHECKED),
        (GATEWAY_PAGE, GATEWAY_PAGE, Verdict.NOT_CHECKED),
    ],
)
def test_lost_prefixes_are_judged_by_the_window_alone(page: str, before: str, verdict: Verdict) -> None:
    assert found("expected prefixes", engine(), front=gateway(page, before)).verdict is verdict
