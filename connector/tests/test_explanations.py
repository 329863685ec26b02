"""Each reason of a failed operation has an explanation, each explanation a reason, and the runbook has the same."""

from __future__ import annotations

from pathlib import Path

from spillway_connector.errors import MISS, CorruptReason, RefusedReason, UnreachableReason
from spillway_connector.explanations import GENERAL, MISSES, OF_TYPE, explanation
from spillway_connector.transfer.stats import MissReason
from spillway_settings.wire import STORE_TYPES

REASONS = {str(reason) for kind in (CorruptReason, RefusedReason, UnreachableReason) for reason in kind} | {MISS}
RUNBOOK = Path(__file__).parents[2] / "docs" / "operations.md"


def test_each_reason_has_an_explanation_and_each_explanation_a_reason() -> None:
    assert GENERAL.keys() == REASONS
    assert {reason for _, reason in OF_TYPE} <= REASONS
    assert {kind for kind, _ in OF_TYPE} <= {*STORE_TYPES}
    assert MISSES.keys() == {reason.value for reason in MissReason}
    assert explanation("a reason of another release", "s3") is None


def test_no_two_reasons_mean_the_same() -> None:
    meanings = [said.meaning for said in (*GENERAL.values(), *OF_TYPE.values())]
    assert len(set(meanings)) == len(meanings)


def test_the_runbook_has_the_same_sentences() -> None:
    """Reasons with one remedy may share a row: the meanings stand in the order of the reasons."""
    runbook = RUNBOOK.read_text(encoding="utf-8")
    said_of = [("", reason, said) for reason, said in GENERAL.items()]
    said_of += [(kind, reason, said) for (kind, reason), said in OF_TYPE.items()]
    alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for kind, reason, said in said_of:
        alike.setdefault((kind, said.remedy or f"nothing for {reason}"), []).append((f"`{reason}`", said.meaning))
    missing = []
    for (kind, remedy), of_reasons in alike.items():
        reasons, meanings = ", ".join(name for name, _ in of_reasons), "; ".join(meaning for _, meaning in of_reasons)
        row = f"| {reasons} | {kind} | {meanings} | {'-' if remedy.startswith('nothing for ') else remedy} |"
        if row not in runbook:
            missing.append(row)
    assert not missing, "rows that docs/operations.md lacks, under Reasons of failures:\n" + "\n".join(missing)


def test_metrics_md_has_each_reason_of_a_miss() -> None:
    page = (RUNBOOK.parent / "metrics.md").read_text(encoding="utf-8")
    assert [reason for reason, said in MISSES.items() if f"| `{reason}` | {said} |" not in page] == []
