"""A request of an agent, as a simulated engine gets it."""

from __future__ import annotations

from dataclasses import dataclass

from spillway_simulator.model.request import EngineRequest


@dataclass(frozen=True, slots=True)
class AgentRequest(EngineRequest):
    """session: the conversation. program: who asks; a crowd is one program. retains: it asks to retain its prompt."""

    session: str = ""
    program: str = ""
    retains: bool = False
