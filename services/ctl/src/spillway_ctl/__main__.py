"""`python -m spillway_ctl`: the same as `spillway`."""

from __future__ import annotations

import sys

from spillway_ctl.command import main

sys.exit(main())
