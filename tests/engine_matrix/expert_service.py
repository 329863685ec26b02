"""`python -m engine_matrix.expert_service --config FILE`: the engine service without its refusal of ranks of a mixture
of experts on a CPU, for a vLLM with `engine_matrix.cpu_experts`, which gives it what it lacks there."""

from __future__ import annotations

import sys

from spillway_engine import resolve
from spillway_engine.__main__ import main

if __name__ == "__main__":
    resolve.fact_contradictions = lambda *_: iter(())
    sys.exit(main())
