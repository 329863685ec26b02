"""Settings of every test in the repository."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["lanes.plugin"]

# The duration of an example depends on the machine more than on the code; speed is measured in bench/.
settings.register_profile("full", deadline=None)
# A quarter of the examples and no shrinking phase: quick feedback during development.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("full")
