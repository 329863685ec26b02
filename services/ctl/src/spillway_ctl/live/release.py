"""`spillway doctor --release FILE`, which `helm test` runs: does a release do what its values say?

Does the gateway obey the values, and for each model: does a chat through the gateway get a well-formed answer, plain
and streamed (and, if keys are required, none without a key), does every engine obey the values, and is a prefix that
one engine computed served from a tier. Then what processes of gateway and engines say of themselves is judged.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from spillway_ctl.doctor import counts_of, print_json, status_of
from spillway_ctl.errors import CommandError
from spillway_ctl.evidence import EngineReading, Exposition, Finding, GatewayReading, Verdict, clock_skew
from spillway_ctl.findings import judge
from spillway_ctl.live.asking import Asker, CheckFailed
from spillway_ctl.named_text import read_named
from spillway_ctl.readings import TEXT, WORDS
from spillway_engine.chat_answers import ANSWER_TOKENS, QUESTION, MalformedAnswer, plain_chat, streamed_chat
from spillway_settings.byte_sizes import parse_byte_count
from spillway_settings.wire import CONFIG_PATH, ENGINE_HEADER, RANK_HEADER

# Network policies and Services name a pod's address some seconds after it has begun to run; until then a connection is
# refused or gets no answer.
REACHABLE_SECONDS = 30.0
# Shown by engines by name alone, or with secrets replaced.
_NOT_COMPARED = ("extraEnv", "extraArgs")


@dataclass(frozen=True, slots=True)
class Release:
    """The facts that the chart writes of a release (templates/tests/doctor.yaml).

    Attributes:
        gateway: url, operations (the address for operators), open (whether that one asks for no key), settings and, if
            it speaks TLS, certificate.
        auth: required, and keyEnv: the variable with a client's key.
        models: for each model its name, engines, settings, chunkTokens, maxLength, offload, shared and apiKeyEnv.
    """

    gateway: Mapping[str, Any]
    auth: Mapping[str, Any]
    models: list[dict[str, Any]]
    timeout_seconds: float

    @property
    def shows_gateway(self) -> bool:
        return not self.auth["required"] or "keyEnv" in self.auth or bool(self.gateway["open"])

    @property
    def client_key(self) -> str:
        return os.environ[self.auth["keyEnv"]] if "keyEnv" in self.auth else ""


def release_of(file: Path | str) -> Release:
    """Raises CommandError."""
    try:
        given = json.loads(read_named(file, "--release"))
        return Release(given["gateway"], given["auth"], given["models"], float(given["timeoutSeconds"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--release {file}: not a release as the chart writes it ({error})") from error


def check_release(release: Release, *, as_json: bool, asker: Asker | None = None, out: TextIO | None = None) -> int:
    """Print a line for each check as soon as it is made; 1 if any failed."""
    out = out if out is not None else sys.stdout
    certificate = release.gateway.get("certificate")
    asker = asker if asker is not None else Asker(Path(certificate) if certificate else None)
    found = []
    for finding in _findings(release, asker):
        found.append(finding)
        if not as_json:
            print(line_of(finding), file=out, flush=True)
    if as_json:
        print_json(found, out)
    else:
        print(f"\n{counts_of(found)}", file=out, flush=True)
    return status_of(found)


def line_of(finding: Finding) -> str:
    label = {Verdict.OK: "ok   ", Verdict.FAILED: "FAILED"}.get(finding.verdict, finding.verdict.value)
    remedy = f" -> {finding.change}" if finding.change and finding.verdict is not Verdict.NOT_CHECKED else ""
    return f"{label} {finding.check}, {finding.where}: {' '.join(finding.found.split())}{remedy}"


def _findings(release: Release, asker: Asker) -> Iterator[Finding]:
    began = time.monotonic()
    deadline = began + release.timeout_seconds * 0.9
    for url in (release.gateway["operations"], release.gateway["url"]):
        asker.wait_until_reachable(url, min(deadline, time.monotonic() + REACHABLE_SECONDS))
    pages = {url: asker.page(url) for model in release.models for url in model["engines"]}
    yield _made("values", "gateway", partial(_check_gateway, release, asker))
    for model in release.models:
        key = _engine_key(model)
        yield _made("chat", model["name"], partial(_check_chat, release, asker, model, key))
        yield _made("values", model["name"], partial(_check_settings, asker, model, key))
        yield _made("tier", model["name"], TierCheck(asker, model, key, deadline))
    gateway, engines = _read_gateway(release, asker), _read_engines(release, asker, pages)
    yield from judge(gateway, engines, time.monotonic() - began)


def _made(check: str, where: str, ask: Callable[[], str | Finding]) -> Finding:
    try:
        found = ask()
    except (CheckFailed, OSError, ValueError, KeyError) as error:
        return Finding(check, where, Verdict.FAILED, str(error))
    return found if isinstance(found, Finding) else Finding(check, where, Verdict.OK, found)


def _engine_key(model: Mapping[str, Any]) -> str:
    return os.environ.get(model.get("apiKeyEnv", ""), "")


def _read_gateway(release: Release, asker: Asker) -> GatewayReading | None:
    """Read the gateway's state, or return None if it may not be asked. One page serves as both ends of the window: the
    next may be another replica's."""
    if not release.shows_gateway:
        return None
    reading, sent = GatewayReading(release.gateway["operations"]), time.time()
    try:
        reading.config, headers = asker.ask(f"{reading.url}{CONFIG_PATH}", release.client_key)
    except (CheckFailed, OSError, ValueError):
        return None  # the check of its settings has said so
    reading.skew_seconds = clock_skew(headers.get("date"), sent, time.time())
    reading.before = reading.after = asker.page(reading.url, release.client_key)
    return reading


def _read_engines(release: Release, asker: Asker, pages: Mapping[str, Exposition | None]) -> list[EngineReading]:
    """Readings of the engines that are ready; other checks report those that are not."""
    readings = []
    for model in release.models:
        key = _engine_key(model)
        for url in filter(asker.is_ready, model["engines"]):
            sent = time.time()
            try:
                config, headers = asker.ask(f"{url}{CONFIG_PATH}", key)
            except (CheckFailed, OSError, ValueError):
                continue
            reading = EngineReading(str(config.get("settings", {}).get("name", url)), url, config=config)
            reading.skew_seconds = clock_skew(headers.get("date"), sent, time.time())
            reading.before, reading.after = pages.get(url), asker.page(url)
            reading.request_problem = "not measured beside a release"
            reading.vllm_version = asker.optional(f"{url}/version", key).get("version")
            text = {"model": model["name"], "prompt": TEXT}
            reading.tokens = asker.optional(f"{url}/tokenize", key, text).get("tokens")
            readings.append(reading)
    return readings


def _check_gateway(release: Release, asker: Asker) -> str | Finding:
    """Every value that the chart wrote, as one of the running gateways has resolved it."""
    if not release.shows_gateway:
        found = "not compared; name an operator's key in tests.apiKeySecret, or set gateway.opsPort"
        return Finding("settings", "gateway", Verdict.NOT_CHECKED, found)
    try:
        resolved, _ = asker.ask(f"{release.gateway['operations']}{CONFIG_PATH}", release.client_key)
    except CheckFailed as refusal:
        if " answered 403: " in str(refusal):
            raise CheckFailed(f"{refusal}; give the tenant of tests.apiKeySecret 'operator: true'") from refusal
        raise
    if wrong := list(differences(release.gateway["settings"], resolved["settings"])):
        raise CheckFailed("the gateway runs with other settings than these values: " + "; ".join(wrong))
    return "it runs with the settings of these values"


def _check_chat(release: Release, asker: Asker, model: Mapping[str, Any], engine_key: str) -> str:
    """A gateway that requires keys has to refuse without one. Any other passes the engines' key on."""
    body = {
        "model": model["name"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    url, key = f"{release.gateway['url']}/v1/chat/completions", engine_key
    if release.auth["required"]:
        _require_refusal(asker, url, body)
        if "keyEnv" not in release.auth:
            return "the gateway refuses without a key; name one in tests.apiKeySecret to have a chat tested"
        key = release.client_key
    answer, headers = asker.ask(url, key, body)
    events = asker.stream(url, key, {**body, "stream": True, "stream_options": {"include_usage": True}})
    try:
        plain, streamed = plain_chat(answer), streamed_chat(events)
    except MalformedAnswer as wrong:
        raise CheckFailed(str(wrong)) from wrong
    if plain.prompt_tokens != streamed.prompt_tokens:
        raise CheckFailed(f"one question has {plain.prompt_tokens} tokens, and {streamed.prompt_tokens} when streamed")
    # The answers are not compared word by word: on another engine, or for a model that is not sure, rounding may choose
    # another word.
    text = f"{plain.text!r}" if plain.text == streamed.text else f"{plain.text!r}, streamed {streamed.text!r}"
    return f"chat answered by {headers.get(ENGINE_HEADER, 'an unnamed engine')}: {text}"


def _require_refusal(asker: Asker, url: str, body: Mapping[str, Any]) -> None:
    try:
        asker.ask(url, "", body)
    except CheckFailed as refusal:
        if " answered 401: " in str(refusal):
            return
        raise
    raise CheckFailed(f"{url} answers without a key, although gateway.auth.keysSecret is set")


def _check_settings(asker: Asker, model: Mapping[str, Any], key: str) -> str:
    """Every value that the chart wrote, as the running engine has resolved it."""
    engines = _ready_engines(asker, model)
    wrong = []
    for engine in engines:
        resolved, _ = asker.ask(f"{engine}{CONFIG_PATH}", key)
        wrong += [f"{engine}: {line}" for line in differences(model["settings"], resolved["settings"])]
    if wrong:
        raise CheckFailed("engines run with other settings than these values: " + "; ".join(wrong))
    return f"{len(engines)} of {len(model['engines'])} engines ready, all with the settings of these values"


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Leaves of `expected` that `actual` lacks or holds otherwise; what else `actual` holds does not matter."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for name, value in expected.items():
            if not (path == "" and name in _NOT_COMPARED):
                yield from differences(value, actual.get(name), f"{path}.{name}" if path else name)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif expected != actual and not _is_that_size(expected, actual):
        yield f"{path} is {actual!r}, not {expected!r}"


def _is_that_size(text: Any, actual: Any) -> bool:
    """Whether the values write, as text, the bytes that a process reads."""
    if not isinstance(text, str) or type(actual) is not int:
        return False
    try:
        return parse_byte_count(text) == actual
    except ValueError:
        return False


def _ready_engines(asker: Asker, model: Mapping[str, Any]) -> list[str]:
    ready = [engine for engine in model["engines"] if asker.is_ready(engine)]
    if not ready:
        raise CheckFailed(f"none of {', '.join(model['engines'])} is ready")
    return ready


def long_prompt(model: Mapping[str, Any]) -> str:
    """New text of at least two chunks: common words are one token each, in every tokenizer."""
    words = min(2 * model["chunkTokens"] + 64, model["maxLength"] // 2)
    return f"{uuid.uuid4()} " + " ".join(WORDS[number % len(WORDS)] for number in range(words))


@dataclass(frozen=True, slots=True)
class TierCheck:
    """One engine computes a prefix; if a tier is shared, another one must find it there."""

    asker: Asker
    model: Mapping[str, Any]
    key: str
    deadline: float

    def __call__(self) -> str:
        if not self.model["offload"]:
            return "offload is off, no tier to check"
        settings = self.model["settings"]
        if settings.get("platform") == "cpu" and settings.get("lora"):  # vLLM computes them wrongly in some batches
            return "adapters on a CPU: requests of the model itself are not offloaded, no tier to check"
        engines = _ready_engines(self.asker, self.model)
        first, prompt = engines[0], long_prompt(self.model)
        stored = "spillway_device_copy_bytes_total"
        before = self._total(first, stored, direction="store"), self._total(first, "spillway_tier_written_bytes_total")
        self._complete(first, prompt)
        copied = self._growth(first, before[0], stored, direction="store")
        if not (self.model["shared"] and len(engines) > 1):
            return f"{copied:,.0f} bytes of KV spilled to the CPU tier"
        self._growth(first, before[1], "spillway_tier_written_bytes_total")
        second = engines[1]
        hits = self._total(second, "spillway_tier_lookups_total", outcome="hit")
        self._complete(second, prompt)
        found = self._growth(second, hits, "spillway_tier_lookups_total", outcome="hit")
        return f"{found:.0f} chunks that {first} computed were served to {second} from the shared tier"

    def _complete(self, engine: str, prompt: str) -> None:
        """Asks for one token. An engine with data parallel ranks is asked at the first, as each counts for itself."""
        rank = {RANK_HEADER: "0"} if self.model["settings"].get("dataParallelSize", 1) > 1 else {}
        body = {"model": self.model["name"], "prompt": prompt, "max_tokens": 1}
        self.asker.ask(f"{engine}/v1/completions", self.key, body, rank)

    def _growth(self, engine: str, before: float, name: str, **labels: str) -> float:
        """Wait until a counter has grown and stands still, and return its growth. Small requests go in between, as it
        moves with engine steps."""
        last = before
        while time.monotonic() < self.deadline:
            self._complete(engine, f"{uuid.uuid4()}")
            now = self._total(engine, name, **labels)
            if now > before and now == last:
                return now - before
            last = now
            time.sleep(self.asker.poll_seconds)
        raise CheckFailed(f"{name} {labels or ''} of {engine} did not grow from {before:g}; it is {last:g}")

    def _total(self, engine: str, name: str, **labels: str) -> float:
        """0 while there is no such series. Raises CheckFailed."""
        page = self.asker.page(engine)
        if page is None:
            raise CheckFailed(f"{engine}/metrics does not answer")
        return page.total(name, **labels) or 0.0
