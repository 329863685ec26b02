"""`.ci/run` with commands that only note their calls: what runs beside what, and what its status and last lines say."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from lanes.rules import ROOT

MAKE = """#!/usr/bin/env bash
case $1 in
    test)
        echo "tests begin" >>calls
        for _ in $(seq 600); do [ "$BESIDE" = yes ] || break; grep -qs "cluster begins" calls && break; sleep 0.05; done
        echo "tests end" >>calls
        echo "===== $TESTS_SAY in 9.10s ====="
        [[ "$TESTS_SAY" != *failed* ]] ;;
    test-cluster)
        for _ in $(seq 600); do grep -qs "tests begin" calls && break; sleep 0.05; done
        echo "cluster begins" >>calls
        mkdir -p build/cluster
        echo '[{"case": "cluster up", "ok": true}]' >build/cluster/report.json
        echo "===== $CLUSTER_SAYS in 8.10s ====="
        [[ "$CLUSTER_SAYS" != *failed* ]] ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with nothing in it but the script and the commands that it calls."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    commands = {
        "bin/make": MAKE,
        "bin/awk": '#!/bin/sh\necho "$MEMORY_GIB"\n',  # reads /proc/meminfo
        "bin/df": "#!/bin/sh\necho Avail\necho 0\n",  # so no real engines
        ".venv/local/bin/python": "#!/bin/sh\n",  # the machine lacks nothing
        "tests/cluster/machine/cluster.sh": "#!/bin/sh\n",
    }
    for name, text in commands.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def run(tree: Path, *, memory_gib: int = 20, tests: str = "3 passed", cluster: str = "2 passed") -> tuple[int, str]:
    environment = {
        **os.environ,
        "PATH": f"{tree / 'bin'}:{os.environ['PATH']}",
        "MEMORY_GIB": str(memory_gib),
        "BESIDE": "yes" if memory_gib > 14 else "no",
        "TESTS_SAY": tests,
        "CLUSTER_SAYS": cluster,
        "SPILLWAY_CLUSTER": str(tree / "cluster"),
    }
    ended = subprocess.run(
        [str(tree / ".ci" / "run")], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return ended.returncode, ended.stdout


def calls(tree: Path) -> list[str]:
    return (tree / "calls").read_text().splitlines()


def test_the_cluster_lane_runs_beside_the_others(tree: Path) -> None:
    status, output = run(tree)

    assert status == 0, output
    assert calls(tree) == ["tests begin", "cluster begins", "tests end"]
    assert output.splitlines()[-3:] == [
        "cluster lane, real engines: not run: 0 GiB of disk are free, and its image needs 40",
        "cluster lane: 2 passed in 8.10s",
        "tests: 3 passed in 9.10s",
    ]
    assert "===== 2 passed in 8.10s =====" in output, "the log of the cluster lane is printed too"


def test_without_memory_for_both_the_cluster_lane_waits(tree: Path) -> None:
    status, output = run(tree, memory_gib=8)

    assert status == 0, output
    assert calls(tree) == ["tests begin", "tests end", "cluster begins"]


@pytest.mark.parametrize(("tests", "cluster"), [("1 failed, 2 passed", "2 passed"), ("3 passed", "1 failed, 1 passed")])
@pytest.mark.parametrize("memory_gib", [8, 20])
def test_a_failure_on_either_side_fails_the_run(tree: Path, tests: str, cluster: str, memory_gib: int) -> None:
    status, output = run(tree, tests=tests, cluster=cluster, memory_gib=memory_gib)

    assert status == 1
    assert output.splitlines()[-2:] == [f"cluster lane: {cluster} in 8.10s", f"tests: {tests} in 9.10s"]
