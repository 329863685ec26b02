"""Who writes the state of the manager and of the scheduler half: they do.

A flag that another object sets before a call is an order that no signature shows.
"""

from __future__ import annotations

import ast
from pathlib import Path

import spillway_connector.engine

ENGINE = Path(spillway_connector.engine.__file__).parent
OWNERS = {"half", "_half", "manager", "_manager", "memo", "primary_tier"}


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def assigned_from_outside(source: str) -> set[str]:
    names = (ast.unparse(target) for node in ast.walk(ast.parse(source)) for target in targets(node))
    return {name for name in names if OWNERS & set(name.split(".")[:-1])}


def test_nothing_sets_a_flag_of_the_manager_before_a_call():
    found = {
        (path.relative_to(ENGINE).as_posix(), name)
        for path in ENGINE.rglob("*.py")
        for name in assigned_from_outside(path.read_text())
    }
    assert not found


def test_each_kind_of_assignment_is_seen():
    source = "self.memo.fresh = False\nself.a, half.manager.b = 1, 2\nmanager.c += 1\nmanager = d.e\nmanager.f: int = 1"
    assert assigned_from_outside(source) == {"self.memo.fresh", "half.manager.b", "manager.c", "manager.f"}
