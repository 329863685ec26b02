"""The Ascend start script run by a real shell, with a stand-in for Python that shows what it was given."""

import os
import signal
import subprocess

import pytest
from chart.rendering import CHART

SCRIPT = CHART / "files" / "start-ascend.sh"


@pytest.fixture
def started(tmp_path):
    python = tmp_path / "python3"
    python.write_text(
        '#!/bin/bash\necho "$@"\necho "devices=${ASCEND_RT_VISIBLE_DEVICES-unset}"\necho "pid=$$"\nexec sleep 30\n'
    )
    python.chmod(0o755)

    def start(**variables):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return subprocess.Popen(
            ["/bin/bash", str(SCRIPT), "--config", "x.yaml"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, "unset"),
        ({"ASCEND_VISIBLE_DEVICES": "3,5"}, "unset"),
        ({"SPILLWAY_VISIBLE_DEVICES": "copy", "ASCEND_VISIBLE_DEVICES": "3,5"}, "3,5"),
        ({"SPILLWAY_VISIBLE_DEVICES": "unset", "ASCEND_RT_VISIBLE_DEVICES": "7"}, "unset"),
        ({"SPILLWAY_VISIBLE_DEVICES": "literal", "ASCEND_RT_VISIBLE_DEVICES": "7"}, "7"),
    ],
)
def test_becomes_the_engine_service(started, variables, devices):
    process = started(**variables)
    try:
        lines = [process.stdout.readline().strip() for _ in range(3)]
        assert lines == ["-m spillway_engine --config x.yaml", f"devices={devices}", f"pid={process.pid}"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM


def test_says_what_is_missing(started):
    process = started(SPILLWAY_VISIBLE_DEVICES="copy")
    _, said = process.communicate(timeout=120)

    assert process.returncode == 2 and "visibleDevices.mode: copy" in said
