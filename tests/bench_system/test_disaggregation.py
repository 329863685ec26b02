from __future__ import annotations

import asyncio
import json
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
from system import disaggregation
from system.disaggregation import (
    HAND_OVER,
    engine_document,
    engines_with_stores,
    gateway_document,
    parsed,
)
from system.legs_load import Kind, LegsLoad, Timed
from system.legs_report import Run, Runs, compared, figures, legs_counted, median_of_buckets, table
from system.legs_scale import CUDA
from system.legs_systems import SYSTEMS

from spillway_engine.settings_reader import load_engine_settings
from spillway_engine.vllm_arguments import kv_transfer_config
from spillway_gateway.config.settings import load_config

KIND = Kind(100, 3, 1.0)


@pytest.fixture
def options(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 5000}')
    return parsed(["--model", str(tmp_path), "--work", str(tmp_path), "--engines", "4"])


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("plain", ["both"] * 4),
        ("always", ["prefill", "prefill", "decode", "decode"]),
        ("auto", ["prefill", "prefill", "decode", "decode"]),
        ("auto_strict", ["prefill", "prefill", "decode", "decode"]),
        ("auto_both", ["both", "both", "decode", "decode"]),
        ("nixl", ["prefill", "prefill", "decode", "decode"]),
        ("nixl_plain", ["both"] * 4),
    ],
)
def test_the_gateway_reads_the_file_of_each_system(name, roles, options, tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(gateway_document(options, SYSTEMS[name])))
    config = load_config(file)
    assert [engine.role.value for engine in config.models[0].engines] == roles
    assert config.disaggregation.is_off == name.endswith("plain")
    assert config.disaggregation.by_connector == name.startswith("nixl")
    assert config.disaggregation.strict_roles == (name == "auto_strict")
    assert config.disaggregation.uncached_tokens_min == 1_024


@pytest.mark.parametrize("store", ["nvme", "node"])
def test_the_engines_read_theirs_and_share_one_tier(store, options, tmp_path):
    options.store = store
    paths = set()
    for at in range(2):
        file = tmp_path / f"engine-{at}.yaml"
        file.write_text(json.dumps(engine_document(options, at)))
        settings = load_engine_settings(file, [])
        offload = settings.offload
        paths.add(offload.shared_tier.nvme.path if store == "nvme" else offload.node_tier.path)
        assert "--max-num-batched-tokens=2048" in settings.extra_args
    assert paths == {str(tmp_path / store)}


def test_an_engine_of_nixl_has_its_connector_alone(options, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text(json.dumps(engine_document(options, 1, nixl=True)))
    settings = load_engine_settings(file, [])
    assert kv_transfer_config(settings) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def test_an_engine_is_known_to_share_a_store_by_either_metric():
    page = """
spillway_gateway_engine_shared_stores{model="model",engine="a"} 1.0
spillway_gateway_engine_shared_stores{model="model",engine="b"} 0.0
spillway_gateway_engine_shared_stores{model="model",engine="c"} 0.0
spillway_gateway_engine_node_blocks{model="model",engine="c"} 0.0
"""
    assert engines_with_stores(page) == 2


def timed(first: float, gaps: list[float], error: str | None = None) -> Timed:
    return Timed(KIND, first, gaps, list(range(len(gaps) + 1)), 100, 0, error)


def test_goodput_counts_what_is_within_both_bounds():
    requests = [
        timed(0.5, [0.01, 0.01]),
        timed(1.5, [0.01, 0.01]),  # its first token was late
        timed(0.5, [0.01, 0.2]),  # its other tokens were
        timed(0.5, [0.01], error="a failure"),
    ]
    found = figures(requests, 10.0, CUDA)
    assert found["goodput_requests_per_second"] == pytest.approx(0.1)
    assert (found["requests"], found["failed_requests"]) == (4, 1)
    assert found["between_tokens_p99_seconds"] == 0.2


def test_a_median_is_interpolated_within_its_bucket_over_all_models():
    lines = [f"# TYPE {HAND_OVER} histogram"]
    for model in ("a", "b"):
        for bound, count in (("0.01", 1), ("0.02", 5), ("+Inf", 5)):
            lines.append(f'{HAND_OVER}_bucket{{le="{bound}",model="{model}"}} {count}.0')
    assert median_of_buckets("\n".join(lines) + "\n", HAND_OVER) == pytest.approx(0.01 + 0.01 * 3 / 8)
    assert median_of_buckets("", HAND_OVER) == 0.0


def test_legs_are_counted_whatever_the_order_of_labels():
    page = (
        'spillway_gateway_legs_total{model="m",decision="two",reason="price"} 3.0\n'
        'spillway_gateway_legs_total{model="m",decision="two",reason="always"} 2.0\n'
        'spillway_gateway_legs_total{decision="one",model="m",reason="short"} 7.0\n'
    )
    assert (legs_counted(page, "one"), legs_counted(page, "two")) == (7.0, 5.0)


def test_auto_is_compared_with_the_better_of_the_others_by_figure():
    written = {}
    for system, goodput, first in (("plain", 2.0, 0.4), ("always", 1.0, 0.2), ("auto", 1.8, 0.25)):
        written[f"{system}_mixed_goodput_requests_per_second"] = goodput
        written[f"{system}_mixed_first_token_p50_seconds"] = first
        written[f"{system}_mixed_between_tokens_p99_seconds"] = first
    found = compared(written, ["plain", "always", "auto"], ["mixed"])
    assert found["auto_mixed_goodput_over_better"] == pytest.approx(0.9)
    assert found["auto_mixed_first_token_speed_over_better"] == pytest.approx(0.8)
    assert found["always_mixed_between_tokens_p99_over_plain"] == pytest.approx(0.5)
    rows = table(written | found, ["plain", "always", "auto"]).splitlines()
    assert rows[1].split() == ["mixed_goodput_requests_per_second", "2", "1", "1.8"]


def test_runs_of_one_number_are_compared_and_what_one_system_differs_by_itself():
    runs = Runs(10.0, CUDA)
    for name, firsts in (("plain", (0.1, 0.2)), ("auto_both", (0.2, 0.1)), ("always", (0.4,))):
        for first in firsts:
            runs.add(name, Run({"requests_of_one_leg": 1.0, "x_seconds": first}, {"mixed": [timed(first, [0.01])]}))
    found = runs.figures("plain")
    assert (found["requests_of_one_leg"], found["x_seconds"]) == (2.0, pytest.approx(0.15))
    assert (found["mixed_requests"], found["mixed_goodput_requests_per_second"]) == (2, pytest.approx(0.1))
    assert [found[f"run_{number}_mixed_first_token_p50_seconds"] for number in (1, 2)] == [0.1, 0.2]
    beside = runs.paired()
    key = "auto_both_mixed_first_token_p50_seconds_speed_over_plain_by_run"
    assert [beside[f"{key}_{which}"] for which in ("lowest", "median", "highest")] == [0.5, 1.25, 2.0]
    assert beside["plain_mixed_first_token_p50_seconds_lowest_over_highest"] == pytest.approx(0.5)
    assert not any(name.startswith("always") for name in beside), "which ran once"


def test_first_tokens_and_gaps_are_taken_from_the_events_with_ids():
    load, request = LegsLoad("", "model", 5_000, "seed"), timed(0.0, [])
    request.ids.clear()
    request.error = "the stream ended without [DONE]"
    last = 0.0
    for event in (
        '{"choices":[{"token_ids":[]}]}',
        '{"choices":[{"token_ids":[1]}]}',
        '{"choices":[{"token_ids":[2, 3]}]}',
    ):
        last = load._event(event.encode(), request, last)
    load._event(b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}', request, last)
    load._event(b"[DONE]", request, last)
    assert (request.ids, len(request.gaps), request.prompt_tokens, request.error) == ([1, 2, 3], 1, 9, None)
    assert request.first_token_seconds > 0


def test_a_request_without_an_answer_has_failed_and_the_others_count():
    async def ask() -> Timed:
        held = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await held.wait()
            writer.close()

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        load = LegsLoad(f"http://{host}:{port}", "model", 5_000, "seed", request_seconds=0.05)
        async with server, load.session() as http:
            try:
                return await load.ask(http, load.prompt(4), Kind(4, 2, 0.0))
            finally:
                held.set()

    silent = asyncio.run(ask())
    assert silent.error is not None and "Timeout" in silent.error
    found = figures([silent, timed(0.5, [0.01])], 1.0, CUDA)
    assert (found["requests"], found["failed_requests"]) == (2, 1)


def test_gateways_take_turns_in_windows_of_the_same_arrivals(options, monkeypatch):
    ports, seen = [], []

    @contextmanager
    def gateway(options, way, name, beside=0):
        ports.append(gateway_document(options, way, beside)["listen"]["port"])
        yield name

    def arrived(options, load, name, mix, number):
        seen.append((name, mix, number))
        return [timed(0.1 if name == "plain" else 0.05 * (2 + number), [0.01])]

    monkeypatch.setattr(disaggregation, "gateway", gateway)
    monkeypatch.setattr(disaggregation, "arrived", arrived)
    monkeypatch.setattr(disaggregation, "of_gateway", lambda url: {"requests_of_two_legs": 0.0})
    options.systems, options.mixes, options.windows = ["plain", "auto"], ["mixed", "mixed", "decode_heavy"], 2
    runs = Runs(options.seconds, CUDA)
    assert len(list(disaggregation.measure_windows(options, runs, nixl=False))) == 2

    assert len(set(ports)) == 2
    assert seen[:4] == [("plain", "mixed", 0), ("auto", "mixed", 0), ("auto", "mixed", 1), ("plain", "mixed", 1)]
    assert seen[4:6] == [("plain", "decode_heavy", 0), ("auto", "decode_heavy", 0)]
    assert [number for name, mix, number in seen if (name, mix) == ("auto", "mixed")] == [0, 1, 2, 3]
    assert runs.figures("auto")["mixed_requests"] == 4
    assert runs.figures("auto")["decode_heavy_requests"] == 2
    beside = runs.paired()
    key = "auto_mixed_first_token_p50_seconds_speed_over_plain_by_run"
    ratios = [1.0, 1 / 1.5, 1 / 2, 1 / 2.5]
    assert beside[f"{key}_highest"] == 1.0 and beside[f"{key}_lowest"] == pytest.approx(0.4)
    assert beside[f"{key}_mean"] == pytest.approx(math.prod(ratios) ** 0.25)
    assert 0.1 < beside[f"{key}_standard_error"] < 0.2
    written = disaggregation.first_tokens(runs, ["plain", "auto"])
    assert written["plain"][0] == {"mixed": [[100, 0.1]]} and len(written["auto"]) == 6
