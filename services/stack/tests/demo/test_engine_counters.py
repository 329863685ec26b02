import http.server
import threading

import pytest

from spillway_stack.demo.engine_counters import EngineCounters, parse_counters, read_counters
from spillway_stack.errors import StackError

TEXT = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 4131.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7952663495911968e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 35.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 4096.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1.2288e+04
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 9999.0
spillway_device_copy_bytes_total{direction="load",engine="0",model_name="m"} 9.437184e+07
spillway_device_copy_bytes_total{direction="store",engine="0",model_name="m"} 1.0
spillway_tier_read_bytes_total{engine="0",model_name="m",tier="nvme"} 2949120.0
spillway_tier_read_bytes_total{engine="0",model_name="m",tier="redis"} 0.0
spillway_tier_written_bytes_total{engine="0",model_name="a \\"quoted\\", name",tier="nvme"} 10
spillway_tier_written_bytes_total{engine="1",model_name="m",tier="nvme"} 5
"""


def test_counters_are_read_by_name_and_label() -> None:
    assert parse_counters(TEXT) == EngineCounters(
        prompt_tokens=4131,
        device_hit_tokens=4096,
        external_hit_tokens=12_288,
        device_load_bytes=94_371_840,
        device_store_bytes=1,
        tier_read_bytes={"nvme": 2_949_120, "redis": 0},
        tier_written_bytes={"nvme": 15},
    )


def test_what_was_never_counted_is_zero() -> None:
    assert parse_counters("# nothing yet\n\n") == EngineCounters()


def test_a_difference_counts_a_tier_that_appeared_since() -> None:
    before, after = parse_counters(""), parse_counters(TEXT)
    assert after.since(before) == after
    assert after.since(after) == EngineCounters(tier_read_bytes={"nvme": 0, "redis": 0}, tier_written_bytes={"nvme": 0})


class _Metrics(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(TEXT.encode())

    def log_message(self, *_: object) -> None:
        pass


class _Failing(_Metrics):
    status = 500


@pytest.mark.parametrize("handler", [_Metrics, _Failing])
def test_an_engine_is_asked_over_http(handler: type[_Metrics]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            if handler is _Metrics:
                assert read_counters(server.server_port).prompt_tokens == 4131
            else:
                with pytest.raises(StackError, match="status 500"):
                    read_counters(server.server_port)
        finally:
            server.shutdown()
    with pytest.raises(StackError, match="make status"):
        read_counters(server.server_port)
