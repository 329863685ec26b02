"""The systems of prefill and decode apart: settings of the gateway over engines that are alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """roles: of the first half of the engines, and of the second. strict: prefill engines answer only if no other can.
    nixl: of engines whose connector is NIXL's alone."""

    mode: str
    roles: tuple[str, str]
    strict: bool = False
    nixl: bool = False


SYSTEMS = {
    "plain": Way("off", ("both", "both")),
    "always": Way("always", ("prefill", "decode")),
    "auto": Way("auto", ("prefill", "decode")),
    "auto_strict": Way("auto", ("prefill", "decode"), strict=True),
    "auto_both": Way("auto", ("both", "decode")),
    "nixl": Way("always", ("prefill", "decode"), nixl=True),
    "nixl_plain": Way("off", ("both", "both"), nixl=True),
}
DEFAULT_SYSTEMS = ["plain", "always", "auto", "auto_both"]
