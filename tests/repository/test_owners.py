"""The state of objects that several rooms share is written by its owners alone.

A flag that another object sets before a call, or at a reload, is an order that no signature shows.
"""

from __future__ import annotations

import ast

import pytest

from repository.tracked import ROOT

# By package: the names under which its shared objects go.
OWNERS = {
    "connector/src/spillway_connector/engine": {"half", "_half", "manager", "_manager", "memo", "primary_tier"},
    "gateway/src/spillway_gateway": {
        *("services", "_services", "live", "pool", "budget", "kept", "suspects", "lifecycle", "_lifecycle"),
        *("open_connections", "body_budget", "reply_budget", "promotion_hints", "gatekeeper", "_gatekeeper"),
        *("gateway", "_gateway", "roster", "_roster", "_router", "fleet", "index", "reader", "_reader"),
        *("fronts", "follower", "_follower", "warm_starts", "pod_costs", "objectives"),
    },
}


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def assigned_from_outside(source: str, owners: set[str]) -> set[str]:
    names = (ast.unparse(target) for node in ast.walk(ast.parse(source)) for target in targets(node))
    return {name for name in names if owners & set(name.split("[")[0].split(".")[:-1])}


@pytest.mark.parametrize(("package", "owners"), OWNERS.items())
def test_no_object_sets_a_field_of_one_that_others_share(package: str, owners: set[str]) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 50
    found = {
        (path.relative_to(ROOT / package).as_posix(), name)
        for path in paths
        for name in assigned_from_outside(path.read_text(), owners)
    }
    assert not found


def test_each_kind_of_assignment_is_seen() -> None:
    source = "self.memo.fresh = False\nself.a, half.manager.b = 1, 2\nmanager.c += 1\nmanager = d.e\nmanager.f: int = 1"
    owners = OWNERS["connector/src/spillway_connector/engine"]
    assert assigned_from_outside(source, owners) == {"self.memo.fresh", "half.manager.b", "manager.c", "manager.f"}
