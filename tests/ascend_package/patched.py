"""A pytest plugin: Spillway's patches of vLLM in force too, as in an engine that has its connector."""

from __future__ import annotations

# Before ours, as vLLM's general plugins come before a connector.
import ascend_package.beside  # noqa: F401
from spillway_connector.engine.meetings import install_meetings
from spillway_connector.engine.v023.failed_loads import install_full_recompute
from spillway_connector.engine.v023.failed_step_loads import install_step_retreat
from spillway_connector.engine.v023.group_hits import install_group_hit_hold

install_full_recompute()
install_group_hit_hold()
install_meetings()
install_step_retreat()
