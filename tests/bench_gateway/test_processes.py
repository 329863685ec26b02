"""The bench's own processes, started as the bench starts them."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest
from gateway_load.processes import end_probing, free_ports, mock_engines, probed_by, start_probing
from gateway_load.prompts import chat_body
from tokenizers import Tokenizer, models

MESSAGES = [{"role": "user", "content": "q"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_mock_engines_answer_plain_and_streamed_and_probes_count_them(tokenizer: Path) -> None:
    (port,) = free_ports(1)
    with mock_engines([port], tokenizer, chunks=3, chunk_seconds=0.0):
        assert json.loads(posted(port, chat_body(MESSAGES, stream=False)))["usage"]["prompt_tokens"] > 0
        streamed = posted(port, chat_body(MESSAGES, stream=True))
        assert streamed.count(b"data:") == 5 and streamed.endswith(b"data: [DONE]\n\n")

        (closed,) = free_ports(1)
        prober = start_probing([f"{port}/health", f"{closed}/health"])
        end_probing(prober)
        (good, bad) = probed_by(prober)
        prober.wait()

    assert len(good[0]) >= 1 and good[1] == 0
    assert len(bad[0]) == bad[1] >= 1


def posted(port: int, body: bytes) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", body)
    answer = connection.getresponse().read()
    connection.close()
    return answer
