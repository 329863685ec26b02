"""Asks every command of a person for help and by an option that it does not have, in one process: what they import,
torch above all, is then imported once. Each answer is a line `RUN {json}`.

    PYTHONPATH=tests python -m command_lines.asked
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Iterator

from lanes.rules import ROOT

OPTIONS = ("--help", "--no-such-option")
# Folders of packages. One with a __main__.py is a command.
PACKAGES = ("settings/src", "connector/src", "gateway/src", "services/ctl/src", "services/engine/src")
PACKAGES += ("services/simulator/src", "services/stack/src", "tests")
FURTHER = (
    "engine_lives.hit_share",
    "self_check.figures",
    "self_check.reference",
    "spillway_connector.device.npu_probe",
    "spillway_connector.engine.stock.check",
    "system.device_run",
    "system.disaggregation",
    "system.legs_simulated",
    "system.simulate",
)
STARTED_BY_PROGRAMS = {"spillway_gateway.processes"}


def commands() -> Iterator[str]:
    """Scripts by their paths, modules by their names."""
    for script in sorted((ROOT / "bench").glob("*.py")):
        if '__name__ == "__main__"' in script.read_text():
            yield str(script.relative_to(ROOT))
    for folder in PACKAGES:
        for found in sorted((ROOT / folder).rglob("__main__.py")):
            name = ".".join(found.parent.relative_to(ROOT / folder).parts)
            if name not in STARTED_BY_PROGRAMS:
                yield name
    yield from FURTHER


def answer(command: str, option: str) -> tuple[object, str]:
    """Exit status, and what it said. None: it went on, and did what it does."""
    said = io.StringIO()
    sys.argv = [command, option]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if command.endswith(".py"):
                runpy.run_path(str(ROOT / command), run_name="__main__")
            else:
                runpy.run_module(command, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code, said.getvalue()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", said.getvalue()
    return None, said.getvalue()


def main() -> None:
    sys.path[:0] = [str(ROOT / "bench")]
    for command in commands():
        for option in OPTIONS:
            status, said = answer(command, option)
            print("RUN", json.dumps({"command": command, "option": option, "status": status, "said": said}), flush=True)


if __name__ == "__main__":
    main()
