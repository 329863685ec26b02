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
    runbook = RUNBOOK.read_text(encoding="utf-8")
    rows = [("", reason, said) for reason, said in GENERAL.items()]
    rows += [(kind, reason, said) for (kind, reason), said in OF_TYPE.items()]
    missing = [
        row
        for kind, reason, said in rows
        if (row := f"| `{reason}` | {kind} | {said.meaning} | {said.remedy or '-'} |") not in runbook
    ]
    assert not missing, "rows that docs/operations.md lacks, under Reasons of failures:\n" + "\n".join(missing)
