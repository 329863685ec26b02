"""The name of vLLM's parser; arguments that a simulator does not use are ignored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        return self.parse_known_args(args)[0]
