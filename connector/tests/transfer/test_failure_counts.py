"""Each handler between a shared tier and its counters counts the error that it catches, or hands it on."""

from __future__ import annotations

import ast
from pathlib import Path

import spillway_connector.transfer

TAKES_ERRORS = {"TierError", "TierCorrupt", "TierMiss", "TierRefused", "TierTimeout", "TierUnreachable", "Exception"}
PASSES_ON = {"count_failure", "_count", "as_tier_error"}


def names_of(handled: ast.expr | None) -> set[str]:
    return {each.id for each in ast.walk(handled) if isinstance(each, ast.Name)} if handled else {"Exception"}


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether an error of a tier ends there, neither raised again nor counted nor handed on."""
    return bool(names_of(handler.type) & TAKES_ERRORS) and not any(
        isinstance(each, ast.Raise)
        or (isinstance(each, ast.Call) and getattr(each.func, "attr", getattr(each.func, "id", "")) in PASSES_ON)
        for each in ast.walk(handler)
    )


def test_no_handler_between_a_tier_and_its_counters_keeps_an_error_to_itself() -> None:
    (folder,) = spillway_connector.transfer.__path__
    modules = sorted(Path(folder).glob("*.py"))
    found = [
        f"{module.name}:{each.lineno}"
        for module in modules
        for each in ast.walk(ast.parse(module.read_text()))
        if isinstance(each, ast.ExceptHandler) and swallows(each)
    ]
    assert modules and not found


def test_a_handler_that_swallows_is_noticed() -> None:
    quiet, loud = (
        ast.parse(f"try:\n    work()\nexcept {name}:\n    {body}").body[0].handlers[0]  # type: ignore[attr-defined]
        for name, body in (("TierError", "pass"), ("(OSError, TierMiss)", "counters.count_failure(it, 'x')"))
    )
    assert swallows(quiet) and not swallows(loud)
