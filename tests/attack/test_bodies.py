"""Bodies made to be costly to read: the event loop turns to other requests meanwhile, and memory stays bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml
from attack.target import MIB, ROUNDS, Target

from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.small_tokenizer import write_tokenizer

KEY = "sk-" + "0" * 40
OTHER_KEY = "sk-" + "1" * 40
LIMITED_KEY = "sk-" + "2" * 40
SECONDS_MAX = 120.0
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.fixture(scope="module")
def target_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tenant, whose salt is set in each body, an alias and a tokenizer: all ways of a body are open."""
    folder = tmp_path_factory.mktemp("settings")
    write_tokenizer(folder, "the quick brown fox jumps over the lazy dog " * 20, 400, TEMPLATE)
    tenants: list[dict[str, Any]] = [
        {"name": "a", "keys": [hash_key(KEY)]},
        {"name": "b", "keys": [hash_key(OTHER_KEY)]},
    ]
    tenants.append({"name": "limited", "keys": [hash_key(LIMITED_KEY)], "promptTokensPerMinute": 300})
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}), encoding="utf-8")
    (folder / "salt").write_text("s" * 32, encoding="utf-8")
    auth = {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}
    return {"settings": {"auth": auth}, "model": {"aliases": ["alias"], "tokenizer": str(folder)}, "key": KEY}


def filled(head: str, unit: str, tail: str, size: int) -> bytes:
    """head, so many units with commas between them that the whole has about `size` bytes, and the tail."""
    return (head + ",".join([unit] * (size // (len(unit) + 1))) + tail).encode()


def chat(unit: str, size: int) -> bytes:
    return filled('{"model":"alias","messages":[', unit, "]}", size)


def call(unit: str, size: int) -> bytes:
    head = '{"model":"alias","messages":[{"role":"assistant","content":"","tool_calls":['
    return filled(head, unit, "]}]}", size)


def arguments(text: str) -> bytes:
    function = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [function]}]
    return json.dumps({"model": "alias", "messages": messages}).encode()


SHAPES: dict[str, Callable[[], bytes]] = {
    "arrays": lambda: filled('{"model":"alias","messages":[],"cache_salt":"x","extra":[', "[]", "]}", 60 * MIB),
    "arrays in tools": lambda: filled('{"model":"alias","messages":[],"tools":[', "[]", "]}", 700_000),
    "nested arrays": lambda: b'{"model":"alias","messages":' + b"[" * 30_000_000 + b"]" * 30_000_000 + b"}",
    "tool calls": lambda: call('{"id":"1","type":"function","function":{"name":"f","arguments":{"a":1}}}', 16 * MIB),
    "short tool calls": lambda: call('{"function":{}}', 60_000),
    "empty messages": lambda: chat("{}", 1_800_000),
    "short messages": lambda: chat('{"role":"user","content":""}', 60_000),
    "many short messages": lambda: chat('{"role":"user","content":""}', 400_000),
    "tools": lambda: filled(
        '{"model":"alias","messages":[{"role":"user","content":"x"}],"tools":[',
        '{"type":"function","function":{"name":"f","parameters":{"a":[1,2,{"b":"c"}]}}}',
        "]}",
        19 * MIB,
    ),
    "long string": lambda: chat('{"role":"user","content":"' + "hello world " * 1_500_000 + '"}', 1),
    "long other string": lambda: b'{"model":"alias","messages":[],"extra":"' + b"a" * 20_000_000 + b'"}',
    "escapes": lambda: chat('{"role":"user","content":"' + "\\n" * 8_000_000 + '"}', 1),
    "numbers": lambda: filled('{"model":"alias","messages":[],"prompt":[', "1", "]}", 20 * MIB),
    "long floats": lambda: filled(
        '{"model":"alias","messages":[],"tools":[', "1.2345678901234567890123e-300", "]}", 60_000
    ),
    "floats": lambda: filled('{"model":"alias","messages":[],"tools":[', "1.2345678901234567890123e-300", "]}", MIB),
    "keys": lambda: b'{"model":"alias","messages":[]' + b"".join(b',"%x":0' % at for at in range(200_000)) + b"}",
    "repeated members": lambda: filled(
        '{"messages":[]',
        '"model":"alias","kv_transfer_params":{"a":1},"vllm_xargs":{"kv_transfer_params":1}',
        "}",
        6 * MIB,
    ).replace(b"]", b"],", 1),
    "blanks": lambda: b" " * 10_000_000 + b'{"model":"alias",' + b" " * 10_000_000 + b'"messages":[]}',
    "arguments": lambda: arguments("[" + "[]," * 5_000_000 + "[]]"),
    "long prompts": lambda: chat('{"role":"user","content":"' + "the quick brown fox, " * 150_000 + '"}', 1),
    "prompt without a cut": lambda: chat('{"role":"user","content":"' + "x" * 3_000_000 + '"}', 1),
    "short arguments": lambda: arguments("[" + "[]," * 20_000 + "[]]"),
    "deep arguments": lambda: arguments("[" * 50_000 + "]" * 50_000),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_body_delays_another_stream(target: Target, shape: str) -> None:
    body = SHAPES[shape]()

    def send() -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        reply = httpx.post(target.url + "/v1/chat/completions", content=body, headers=headers, timeout=SECONDS_MAX)
        assert reply.status_code in (200, 400, 413), reply.text

    # The body itself, what it is copied to with another model's name and salt, and what of it waits in sockets.
    target.suffer(send).assert_bearable(grown_mib_max=96 + 3 * len(body) // MIB)


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_no_prompt_of_token_ids_delays_another_stream(target: Target, path: str) -> None:
    name = "prompt" if "completions" in path else "token_ids"
    body = filled('{"model":"alias","stream":true,"' + name + '":[', "12345", "]}", 8 * MIB)

    def send() -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        reply = httpx.post(target.url + path, content=body, headers=headers, timeout=SECONDS_MAX)
        assert reply.status_code in (200, 400), reply.text

    target.suffer(send).assert_bearable(grown_mib_max=128)


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [1] * 1000 + [2.0]}),
    ("/v1/completions", {"prompt": "東京" * 500}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 800}]}]}),
    ("/v1/rerank", {"query": "q", "documents": [{"text": "word " * 800}]}),
    ("/tokenize", {"prompt": "word " * 800}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_no_form_of_a_prompt_passes_a_limit_of_tokens_by(target: Target, path: str, body: dict[str, Any]) -> None:
    """One passes as its bucket holds something, whatever the forms before it took; the next finds it empty."""
    headers = {"authorization": f"Bearer {LIMITED_KEY}"}
    statuses = [
        httpx.post(target.url + path, json={"model": "fake", **body}, headers=headers, timeout=SECONDS_MAX).status_code
        for _ in range(3)
    ]
    assert statuses[1:] == [429, 429]


def test_long_prompts_of_one_tenant_hold_up_no_other_prompt(target: Target) -> None:
    """Two of 4 MB, as many as there are threads that tokenise; another's is read by its tokens meanwhile. A machine
    with other work may once take too long for that; a gateway whose threads are held does so in each round."""
    assert any(not _missed_turns(target) for _ in range(ROUNDS))


def _missed_turns(target: Target) -> int:
    """Count the prompts that were matched by text, as they were not tokenised in time."""
    before = target.log().count("was not tokenised within")
    long = {"model": "alias", "prompt": "jumps over the lazy dog, " * 160_000}
    other = {"model": "fake", "prompt": "words of another kind " * 400}
    with ThreadPoolExecutor(2) as attackers:
        attacks = [attackers.submit(_complete, target, KEY, long) for _ in range(2)]
        for _ in range(5):
            assert _complete(target, OTHER_KEY, other) == 200
            other["prompt"] += "and more of them "
        assert all(attack.result() in (200, 400) for attack in attacks)
    return target.log().count("was not tokenised within") - before


def _complete(target: Target, key: str, body: dict[str, Any]) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(target.url + "/v1/completions", json=body, headers=headers, timeout=SECONDS_MAX).status_code
