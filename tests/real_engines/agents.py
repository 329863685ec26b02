"""Coding agents as they are, behind a gateway without a setting: it knows the session of each request, and what a later
turn finds cached is in the reply, in the words of its API. Beside the same requests without what names a session."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import httpx

from spillway_gateway.testing.agent_requests import AgentRequest, claude_code, codex, opencode

from .fleet import Fleet, words

PART = "agents"
# The agents send tools, and vLLM takes none without a parser.
OVERRIDES = ('extraArgs=["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]',)
SESSIONS, TURNS = 2, 3
REQUESTS = SESSIONS * (TURNS + 1)  # of an agent: each session starts a sub-agent
WORDS_PER_TURN = 250
HIT_RATIO_MIN = 0.5  # of second and later turns
MEMBERS = {"claude": "messages", "codex": "input", "opencode": "messages"}  # of the body: the conversation so far
NAMING_MEMBERS = ("metadata", "prompt_cache_key")
UUID = "0b6c2f60-7f5e-4a53-9a6f-2f6f1c6d{:04x}"


@dataclass
class Seen:
    """Outcomes of the requests of one agent."""

    failed: list[str] = field(default_factory=list)
    prompt_tokens: int = 0  # of second and later turns
    cached_tokens: int = 0

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def request_of(agent: str, number: int, text: str, *, subagent: bool = False) -> AgentRequest:
    """The first request of an agent's session, or of a sub-agent that it started."""
    session = UUID.format(number)
    if agent == "claude":
        return claude_code(session, text, subagent="agent-1" if subagent else None)
    if agent == "codex":
        thread = {"thread": UUID.format(number + 0x1000), "parent": session} if subagent else {}
        return codex(session, text, **thread)
    named = f"ses_{number}"
    return opencode(f"{named}_sub", text, parent=named) if subagent else opencode(named, text)


def without_names(request: AgentRequest) -> AgentRequest:
    """The same prompt without a session."""
    body = {name: value for name, value in request.body.items() if name not in NAMING_MEMBERS}
    kept = {name: value for name, value in request.headers.items() if name == "Anthropic-Version"}
    return AgentRequest(request.path, kept, body)


def usage_of(body: dict[str, Any]) -> tuple[int, int]:
    """(tokens of the prompt, those of them that were cached), in the words of whichever API."""
    usage = body["usage"]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"].get("cached_tokens") or 0
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached, cached


class Run:
    """Sessions of one agent, named or not. What a run asks no other run asks."""

    def __init__(self, fleet: Fleet, agent: str, *, named: bool) -> None:
        self._fleet, self._agent, self._named = fleet, agent, named
        self.seen = Seen()

    def all(self) -> Seen:
        for number in range(SESSIONS):
            self._session(number)
        return self.seen

    def _session(self, number: int) -> None:
        name = f"{self._agent} {self._named} {number}"
        number += 16 * self._named + 256 * list(MEMBERS).index(self._agent)
        first = request_of(self._agent, number, words(f"{name} 0", WORDS_PER_TURN))
        conversation = copy.deepcopy(first.body[MEMBERS[self._agent]])
        for turn in range(TURNS):
            if turn:
                # A reply of a tiny model may be a call of a tool, or nothing: its words are ours.
                conversation.append({"role": "assistant", "content": "I have read it."})
                conversation.append({"role": "user", "content": words(f"{name} {turn}", WORDS_PER_TURN)})
            body = first.body | {MEMBERS[self._agent]: conversation}
            self._ask(AgentRequest(first.path, first.headers, body), counts=turn > 0)
        self._ask(request_of(self._agent, number, words(f"{name} sub", 50), subagent=True), counts=False)

    def _ask(self, request: AgentRequest, *, counts: bool) -> None:
        asked = request if self._named else without_names(request)
        body = asked.body | {"model": self._fleet.model}
        body |= {"max_output_tokens": 8} if self._agent == "codex" else {}
        reply = httpx.post(self._fleet.gateway + asked.path, json=body, headers=asked.headers, timeout=300)
        if reply.status_code != 200:
            self.seen.failed.append(f"{reply.status_code}: {reply.text[:200]}")
        elif counts:
            prompt, cached = usage_of(reply.json())
            self.seen.prompt_tokens += prompt
            self.seen.cached_tokens += cached


def run(fleet: Fleet) -> None:
    cores = fleet.cores()
    for agent in MEMBERS:
        before = _in_sessions(fleet)
        named = Run(fleet, agent, named=True).all()
        between = _in_sessions(fleet)
        nameless = Run(fleet, agent, named=False).all()
        failed = [*named.failed, *nameless.failed]
        fleet.rows.add(PART, f"{agent}: requests refused", failed[:1] or 0, not failed)
        known = between - before, _in_sessions(fleet) - between
        fleet.rows.add(
            PART,
            f"{agent}: of {REQUESTS} requests, those whose session is known",
            f"{known[0]}; without names {known[1]}",
            known == (REQUESTS, 0),
        )
        fleet.rows.add(
            PART,
            f"{agent}: hit ratio of later turns, as its API reports it",
            f"{named.hit_ratio:.2f}; without names {nameless.hit_ratio:.2f}",
            named.hit_ratio >= HIT_RATIO_MIN,
        )
    lost = fleet.lost_since(cores)
    fleet.rows.add(PART, "engines lost", lost, lost == 0)


def _in_sessions(fleet: Fleet) -> int:
    """Requests so far of which the gateway knows the session."""
    return int(fleet.stack.gateway_metrics().total("spillway_gateway_session_choices_total"))
