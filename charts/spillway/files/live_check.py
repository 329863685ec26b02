"""What `helm test` runs: does the running service match its values?

With the standard library alone: does the gateway obey the values, and for each model: does a chat through the gateway
get a well-formed answer, plain and streamed (and, where keys are required, none without a key), does every engine obey
the values, and is a prefix that one engine computed served from a tier. At the end the checks of `spillway doctor`, as
far as they can be made from here: what the processes of gateway and engines say of themselves.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spillway_ctl.evidence import EngineReading, Exposition, Finding, GatewayReading, Verdict, clock_skew
from spillway_ctl.findings import judge

REQUEST_SECONDS = 120.0
POLL_SECONDS = 1.0
# Network policies and Services name a pod's address some seconds after it has begun to run; until then a connection is
# refused or gets no answer.
REACHABLE_SECONDS = 30.0
CONNECT_SECONDS = 5.0
TEXT = "Once upon a time,  there were 3 tokenizers:\n\tλ, β and 🙂."
QUESTION = "Name the capital of France."
ANSWER_TOKENS = 16
FINISH_REASONS = ("stop", "length")
# Where a reasoning parser is on, the first tokens of an answer may all be here.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
WORDS = ("the", "house", "and", "the", "water", "of", "one", "day")
# Shown by engines by name alone, or with secrets replaced.
NOT_COMPARED = ("extraEnv", "extraArgs")
# There where the gateway speaks TLS: its own certificate, whatever names it was made for.
CERTIFICATE = Path("/etc/spillway-certificate/tls.crt")


class CheckFailed(Exception):
    """What was expected and what was seen."""


def main(arguments: list[str]) -> int:
    expected = json.loads(Path(arguments[0]).read_text())
    began = time.monotonic()
    deadline = began + float(expected["timeoutSeconds"]) * 0.9
    gateway, auth = expected["gateway"], expected["auth"]
    checks = [("gateway, settings", partial(check_gateway, gateway, auth))]
    for model in expected["models"]:
        engine_key = os.environ.get(model.get("apiKeyEnv", ""), "")
        checks += [
            (f"{model['name']}, chat", partial(check_chat, gateway["url"], auth, model, engine_key)),
            (f"{model['name']}, settings", partial(check_settings, model, engine_key)),
            (f"{model['name']}, tier", partial(check_tier, model, engine_key, deadline)),
        ]
    for url in (gateway["operations"], gateway["url"]):
        wait_until_reachable(url, min(deadline, time.monotonic() + REACHABLE_SECONDS))
    pages = {url: page(url) for model in expected["models"] for url in model["engines"]}
    failures = 0
    for name, check in checks:
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except (CheckFailed, OSError, ValueError, KeyError) as error:
            failures += 1
            print(f"FAILED {name}: {error}", flush=True)
    for finding in judge(
        read_gateway(gateway, auth), read_engines(expected["models"], pages), time.monotonic() - began
    ):
        failures += finding.verdict is Verdict.FAILED
        print(line_of(finding), flush=True)
    return 1 if failures else 0


def line_of(finding: Finding) -> str:
    label = {Verdict.OK: "ok   ", Verdict.FAILED: "FAILED"}.get(finding.verdict, finding.verdict.value)
    remedy = f" -> {finding.change}" if finding.change and finding.verdict is not Verdict.NOT_CHECKED else ""
    return f"{label} {finding.check}, {finding.where}: {' '.join(finding.found.split())}{remedy}"


def read_gateway(gateway: Mapping[str, Any], auth: Mapping[str, Any]) -> GatewayReading | None:
    """None where it may not be asked. One page serves as both ends of the window: the next may be another replica's."""
    if auth["required"] and "keyEnv" not in auth and not gateway["open"]:
        return None
    reading, sent = GatewayReading(gateway["operations"]), time.time()
    try:
        reading.config, headers = ask(f"{reading.url}/spillway/config", client_key(auth))
    except (CheckFailed, OSError, ValueError):
        return None  # the check of its settings has said so
    reading.skew_seconds = clock_skew(headers.get("date"), sent, time.time())
    reading.before = reading.after = page(reading.url, client_key(auth))
    return reading


def read_engines(models: list[dict[str, Any]], pages: Mapping[str, Exposition | None]) -> list[EngineReading]:
    """Readings of the engines that are ready; other checks report those that are not."""
    readings = []
    for model in models:
        key = os.environ.get(model.get("apiKeyEnv", ""), "")
        for url in filter(is_ready, model["engines"]):
            sent = time.time()
            try:
                config, headers = ask(f"{url}/spillway/config", key)
                reading = EngineReading(str(config.get("settings", {}).get("name", url)), url, config=config)
                reading.skew_seconds = clock_skew(headers.get("date"), sent, time.time())
                reading.before, reading.after = pages.get(url), page(url)
                reading.request_problem = "not measured by helm test"
                reading.vllm_version = optional(f"{url}/version", key).get("version")
                reading.tokens = optional(f"{url}/tokenize", key, {"model": model["name"], "prompt": TEXT}).get(
                    "tokens"
                )
            except (CheckFailed, OSError, ValueError):
                continue
            readings.append(reading)
    return readings


def optional(url: str, key: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Empty where an engine has no such route."""
    try:
        return ask(url, key, body)[0]
    except (CheckFailed, OSError, ValueError):
        return {}


def wait_until_reachable(url: str, deadline: float) -> None:
    """Returns once a connection is made, or at the deadline: what is wrong then, the checks say."""
    address = urllib.parse.urlsplit(url)
    while True:
        try:
            socket.create_connection(
                (address.hostname, address.port or {"http": 80, "https": 443}[address.scheme]), CONNECT_SECONDS
            ).close()
        except OSError:
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_SECONDS)
        else:
            return


def page(url: str, key: str = "") -> Exposition | None:
    """/metrics; None where it is not shown."""
    try:
        with open_url(f"{url}/metrics", REQUEST_SECONDS, headers=bearer(key)) as reply:
            return Exposition(reply.read().decode())
    except (OSError, ValueError):
        return None


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def check_gateway(gateway: Mapping[str, Any], auth: Mapping[str, Any]) -> str:
    """Every value that the chart wrote, as one of the running gateways has resolved it."""
    if auth["required"] and "keyEnv" not in auth and not gateway["open"]:
        return "not compared; name an operator's key in tests.apiKeySecret, or set gateway.opsPort"
    url = f"{gateway['operations']}/spillway/config"
    try:
        resolved, _ = ask(url, client_key(auth))
    except CheckFailed as refusal:
        if " answered 403: " in str(refusal):
            raise CheckFailed(f"{refusal}; give the tenant of tests.apiKeySecret 'operator: true'") from refusal
        raise
    wrong = list(differences(gateway["settings"], resolved["settings"]))
    if wrong:
        raise CheckFailed("the gateway runs with other settings than these values: " + "; ".join(wrong))
    return "it runs with the settings of these values"


def client_key(auth: Mapping[str, Any]) -> str:
    return os.environ[auth["keyEnv"]] if "keyEnv" in auth else ""


def check_chat(gateway: str, auth: Mapping[str, Any], model: Mapping[str, Any], engine_key: str) -> str:
    """Where the gateway requires keys, it has to refuse without one. Elsewhere it passes the engines' key on."""
    body = {
        "model": model["name"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    url = f"{gateway}/v1/chat/completions"
    key = engine_key
    if auth["required"]:
        require_refusal(url, body)
        if "keyEnv" not in auth:
            return "the gateway refuses without a key; name one in tests.apiKeySecret to have a chat tested"
        key = client_key(auth)
    answer, headers = ask(url, key, body)
    plain, prompt_tokens = plain_chat(answer)
    streamed, streamed_prompt_tokens = streamed_chat(
        ask_stream(url, key, {**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    if prompt_tokens != streamed_prompt_tokens:
        raise CheckFailed(f"one question has {prompt_tokens} tokens, and {streamed_prompt_tokens} when streamed")
    # Not compared word by word: on another engine, or for a model that is not sure, rounding may choose another word.
    text = f"{plain!r}" if plain == streamed else f"{plain!r}, streamed {streamed!r}"
    return f"chat answered by {headers.get('x-spillway-engine', 'an unnamed engine')}: {text}"


def plain_chat(answer: Mapping[str, Any]) -> tuple[str, int]:
    """Text and tokens of the prompt. Raises CheckFailed unless it is one well-formed chat.completion."""
    choices = answer.get("choices") or []
    if answer.get("object") != "chat.completion" or len(choices) != 1:
        raise CheckFailed(f"the chat's answer is no chat.completion with one choice: {answer}")
    message = choices[0].get("message") or {}
    if message.get("role") != "assistant":
        raise CheckFailed(f"the role of the chat's answer is not assistant: {answer}")
    return checked_chat(text_of(message), choices[0].get("finish_reason"), answer.get("usage"))


def streamed_chat(events: list[str]) -> tuple[str, int]:
    """The same of the data of a stream's events."""
    if not events or events[-1] != "[DONE]":
        raise CheckFailed(f"the streamed chat ended without [DONE]: {events[-2:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    for chunk in chunks:
        if chunk.get("object") != "chat.completion.chunk":
            raise CheckFailed(f"the streamed chat holds something else than chunks: {chunk}")
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    deltas = [choice.get("delta") or {} for choice in choices]
    ids = {chunk.get("id") for chunk in chunks}
    roles = {delta["role"] for delta in deltas if delta.get("role")}
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(ids) != 1 or roles != {"assistant"} or len(reasons) != 1:
        raise CheckFailed(
            f"a streamed chat has one id, the role assistant and one finish_reason; this one has {len(ids)}, "
            f"{sorted(roles)} and {reasons}"
        )
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    return checked_chat("".join(map(text_of, deltas)), reasons[0], usage)


def text_of(message: Mapping[str, Any]) -> str:
    return "".join(message.get(name) or "" for name in TEXT_FIELDS)


def checked_chat(text: str, finish_reason: object, usage: Mapping[str, Any] | None) -> tuple[str, int]:
    if not text.strip():
        raise CheckFailed("the chat's answer is empty")
    if finish_reason not in FINISH_REASONS:
        raise CheckFailed(f"the chat's answer ends with finish_reason {finish_reason!r}")
    usage = usage or {}
    prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    if prompt < 1 or not 1 <= completion <= ANSWER_TOKENS or usage.get("total_tokens") != prompt + completion:
        raise CheckFailed(f"the usage of the chat's answer does not add up: {usage}")
    return text, prompt


def require_refusal(url: str, body: Mapping[str, Any]) -> None:
    try:
        ask(url, "", body)
    except CheckFailed as refusal:
        if " answered 401: " in str(refusal):
            return
        raise
    raise CheckFailed(f"{url} answers without a key, although gateway.auth.keysSecret is set")


def check_settings(model: Mapping[str, Any], key: str) -> str:
    """Every value that the chart wrote, as the running engine has resolved it."""
    engines = ready_engines(model)
    wrong = []
    for engine in engines:
        resolved, _ = ask(f"{engine}/spillway/config", key)
        wrong += [f"{engine}: {line}" for line in differences(model["settings"], resolved["settings"])]
    if wrong:
        raise CheckFailed("engines run with other settings than these values: " + "; ".join(wrong))
    return f"{len(engines)} of {len(model['engines'])} engines ready, all with the settings of these values"


def check_tier(model: Mapping[str, Any], key: str, deadline: float) -> str:
    """One engine computes a prefix; where a tier is shared, another one must find it there."""
    if not model["offload"]:
        return "offload is off, no tier to check"
    engines = ready_engines(model)
    first, prompt = engines[0], long_prompt(model)
    stored = "spillway_device_copy_bytes_total"
    before = series_sum(first, stored, direction="store"), series_sum(first, "spillway_tier_written_bytes_total")
    complete(first, model, key, prompt)
    copied = wait_for_growth(first, model, key, deadline, before[0], stored, direction="store")
    if not (model["shared"] and len(engines) > 1):
        return f"{copied:,.0f} bytes of KV spilled to the CPU tier"
    wait_for_growth(first, model, key, deadline, before[1], "spillway_tier_written_bytes_total")
    second = engines[1]
    hits = series_sum(second, "spillway_tier_lookups_total", outcome="hit")
    complete(second, model, key, prompt)
    found = wait_for_growth(second, model, key, deadline, hits, "spillway_tier_lookups_total", outcome="hit")
    return f"{found:.0f} chunks that {first} computed were served to {second} from the shared tier"


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Leaves of `expected` that `actual` lacks or holds otherwise; what else `actual` holds does not matter."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for name, value in expected.items():
            if not (path == "" and name in NOT_COMPARED):
                yield from differences(value, actual.get(name), f"{path}.{name}" if path else name)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif expected != actual:
        yield f"{path} is {actual!r}, not {expected!r}"


def ready_engines(model: Mapping[str, Any]) -> list[str]:
    ready = [engine for engine in model["engines"] if is_ready(engine)]
    if not ready:
        raise CheckFailed(f"none of {', '.join(model['engines'])} is ready")
    return ready


def is_ready(engine: str) -> bool:
    try:
        with open_url(f"{engine}/ready", 5.0):
            return True
    except OSError:
        return False


def long_prompt(model: Mapping[str, Any]) -> str:
    """New text of at least two chunks: common words are one token each, in every tokenizer."""
    words = min(2 * model["chunkTokens"] + 64, model["maxLength"] // 2)
    return f"{uuid.uuid4()} " + " ".join(WORDS[number % len(WORDS)] for number in range(words))


def complete(engine: str, model: Mapping[str, Any], key: str, prompt: str) -> None:
    """Asks for one token. An engine with data parallel ranks is asked at the first one, as each counts for itself."""
    rank = {"x-data-parallel-rank": "0"} if model["settings"].get("dataParallelSize", 1) > 1 else {}
    ask(f"{engine}/v1/completions", key, {"model": model["name"], "prompt": prompt, "max_tokens": 1}, rank)


def wait_for_growth(  # noqa: PLR0917
    engine: str, model: Mapping[str, Any], key: str, deadline: float, before: float, name: str, **labels: str
) -> float:
    """Until a counter has grown and stands still; small requests in between, as counters move with engine steps."""
    last = before
    while time.monotonic() < deadline:
        complete(engine, model, key, f"{uuid.uuid4()}")
        now = series_sum(engine, name, **labels)
        if now > before and now == last:
            return now - before
        last = now
        time.sleep(POLL_SECONDS)
    raise CheckFailed(f"{name} {labels or ''} of {engine} did not grow from {before:g}; it is {last:g}")


def series_sum(engine: str, name: str, **labels: str) -> float:
    """The sum over all series of one metric that carry these labels; 0 while there is none."""
    with open_url(f"{engine}/metrics", REQUEST_SECONDS) as reply:
        text = reply.read().decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)
    )


def ask(
    url: str, key: str, body: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], Mapping[str, str]]:
    headers = {"content-type": "application/json", **bearer(key), **(more or {})}
    try:
        with open_url(url, REQUEST_SECONDS, None if body is None else json.dumps(body).encode(), headers) as reply:
            return json.load(reply), reply.headers
    except urllib.error.HTTPError as error:
        raise CheckFailed(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}") from error


def ask_stream(url: str, key: str, body: Mapping[str, Any]) -> list[str]:
    """The data of each event."""
    headers = {"content-type": "application/json", **bearer(key)}
    try:
        with open_url(url, REQUEST_SECONDS, json.dumps(body).encode(), headers) as reply:
            return [line[5:].strip().decode() for line in reply if line.startswith(b"data:")]
    except urllib.error.HTTPError as error:
        raise CheckFailed(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}") from error


def open_url(
    url: str, timeout_seconds: float, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Any:
    # The addresses are the chart's own, http and https alone.
    request = urllib.request.Request(url, data=body, headers=dict(headers or {}))  # noqa: S310
    context = trusting(CERTIFICATE) if url.startswith("https:") else None
    return urllib.request.urlopen(request, timeout=timeout_seconds, context=context)  # noqa: S310


def trusting(certificate: Path) -> ssl.SSLContext:
    """Takes this certificate, or one that it signed, and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
