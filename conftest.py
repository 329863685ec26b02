"""Settings of every test in the repository."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about the machine than about the code; speed is measured in bench/.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
