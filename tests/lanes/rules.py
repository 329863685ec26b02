"""The needs of each folder's tests, and the lane that provides them. The only place that defines them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parents[2]
NOTHING = "nothing"


class Lane(StrEnum):
    """The lanes in the order in which `make test` runs them; the last two it does not run."""

    UNIT = "unit"
    QUICK = "quick"
    ENGINE = "engine"
    FULL = "full"
    OTHER_VLLM = "other-vllm"
    CLUSTER = "cluster"
    BROWSER = "browser"


# Marker -> (lane, what it means). A test with several needs runs in the last of their lanes.
NEEDS: dict[str, tuple[Lane, str]] = {
    NOTHING: (Lane.UNIT, "the packages of requirements/local.txt and a C compiler; no vLLM, no server process"),
    "vllm": (Lane.QUICK, "imports vLLM, starts no engine"),
    "servers": (Lane.QUICK, "Spillway's own servers as processes: gateway, simulator, mock engines"),
    "valkey": (Lane.QUICK, "a real Valkey"),
    "s3": (Lane.QUICK, "a real S3 server, SeaweedFS"),
    "helm": (Lane.QUICK, "renders the chart with Helm 3 and 4"),
    "engine": (Lane.ENGINE, "one real vLLM engine at a time, and nothing around it"),
    "engines": (Lane.FULL, "real vLLM engines with a model behind a gateway"),
    "other_vllm": (Lane.OTHER_VLLM, "an environment with another vLLM than the local one"),
    "cluster": (Lane.CLUSTER, "a real Kubernetes on this machine"),
    "chromium": (Lane.BROWSER, "a real browser"),
}

# Folder or file -> markers. A folder's entry covers what is in it and has no entry of its own.
RULES: dict[str, tuple[str, ...]] = {
    "settings/tests": (NOTHING,),
    "connector/tests": (NOTHING,),
    "connector/tests/engine": ("vllm",),
    "connector/tests/engine/v030": ("other_vllm",),
    "connector/tests/engine_npu": ("engine",),
    "connector/tests/tiers/redis/redis_servers": ("valkey",),
    "connector/tests/tiers/redis/test_rows.py": ("valkey",),
    "connector/tests/tiers/redis/test_tier.py": ("valkey",),
    "connector/tests/tiers/redis/client/test_value_path.py": ("valkey",),
    "connector/tests/tiers/redis/client/test_dial.py": ("valkey",),
    "connector/tests/tiers/redis/client/test_pool.py": ("valkey",),
    "connector/tests/tiers/s3/s3_server": ("s3",),
    "connector/tests/tiers/test_sealed.py": ("valkey",),
    "gateway/tests": (NOTHING,),
    "gateway/tests/access/test_shared_limits.py": ("valkey",),
    "gateway/tests/picker/test_envoy.py": ("servers",),
    "gateway/tests/picker/test_restarts.py": ("servers",),
    "gateway/tests/picker/test_same_decisions.py": ("servers",),
    "gateway/tests/config/test_follower.py": ("servers",),
    "gateway/tests/test_main.py": ("servers",),
    "services/ctl/tests": ("valkey", "s3"),
    "services/ctl/tests/check": (NOTHING,),
    "services/engine/tests": (NOTHING,),
    "services/engine/tests/vllm": ("vllm",),
    "services/simulator/tests": (NOTHING,),
    "services/stack/tests": (NOTHING,),
    "tests/ascend_acceptance": ("engine",),
    "tests/ascend_package": ("vllm",),
    "tests/attack": ("servers",),
    "tests/bench_engine": ("vllm",),
    "tests/bench_gateway": (NOTHING,),
    "tests/bench_gateway/test_processes.py": ("servers",),
    "tests/bench_soak": (NOTHING,),
    "tests/bench_soak/test_run.py": ("servers", "valkey"),
    "tests/bench_soak/test_store_faults.py": ("valkey",),
    "tests/bench_retention": ("vllm",),
    "tests/bench_system": (NOTHING,),
    "tests/bench_system/test_memory.py": ("vllm",),
    "tests/bench_system/test_simulate.py": ("vllm",),
    "tests/chaos": ("servers",),
    "tests/chart": ("helm",),
    "tests/chart/test_planned_tiers.py": ("helm", "vllm"),
    "tests/chart/test_processes.py": ("helm", "servers"),
    "tests/chart/test_redis.py": ("helm", "valkey"),
    "tests/cluster": ("cluster",),
    "tests/command_lines": ("vllm",),
    "tests/continuation": ("servers",),
    "tests/e2e": ("engines",),
    "tests/e2e/test_doctor.py": ("other_vllm",),
    "tests/e2e/test_metrics.py": ("other_vllm",),
    "tests/e2e/test_upgrade.py": ("other_vllm",),
    "tests/engine_chain": ("engine", "s3"),
    "tests/engine_lives": ("vllm",),
    "tests/engine_matrix": ("engine",),
    "tests/engine_events": ("vllm",),
    "tests/engine_salts": ("vllm",),
    "tests/faults": ("engines",),
    "tests/generations": ("other_vllm",),
    "tests/generations/test_table.py": (NOTHING,),
    "tests/lanes": (NOTHING,),
    "tests/node_tier": ("vllm",),
    "tests/node_tier/test_engines.py": ("engine",),
    "tests/promotion_hints": ("servers",),
    "tests/random_plans": ("vllm",),
    "tests/real_engines": (NOTHING,),
    "tests/reference_answers": (NOTHING,),
    "tests/reference_answers/test_float32.py": ("engine",),
    "tests/replica": ("servers",),
    "tests/repository": (NOTHING,),
    "tests/self_check": ("engine",),
    "tests/self_check/test_reference.py": ("vllm",),
    "tests/stack_driver": (NOTHING,),
    "tests/stock_tiers": ("other_vllm",),
    "tests/types": ("other_vllm",),
    "tests/ui": ("chromium",),
    "tests/upstream": ("vllm",),
    "tests/vllm_signatures": (NOTHING,),
}

LOCAL_VLLM = "0.23"  # of requirements/local.txt, which runs every other lane
# Folder or file -> other versions whose environments (requirements/vllm-*.txt) run it in the lane `other-vllm`. Where
# its rule names `other_vllm`, only they do.
OTHER_VLLM: dict[str, tuple[str, ...]] = {
    "tests/engine_events": ("0.30", "0.32"),
    "tests/engine_salts": ("0.30", "0.32"),
    "services/engine/tests/vllm": ("0.30", "0.32"),
    "services/engine/tests/vllm/test_kv_groups.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/cpu_tier/test_lru_rows.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/features/test_fair_steps.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/features/test_feature.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/features/test_meetings.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/features/test_window_stores.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/ipc/test_statistics_due.py": ("0.32",),
    "connector/tests/engine/layouts/test_equal_ranks.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/layouts/test_kv_layout.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/layouts/test_stages.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/manager/test_early_loads.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/manager/test_prefix_lookup.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/namespace/test_adapters.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/namespace/test_fields.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/namespace/test_weights.py": ("0.32", "0.33"),
    "connector/tests/engine/node_tier/test_rows.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/node_tier/test_shared_tier.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/patches/test_own_connector.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/requests/test_transfer_params.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/scheduler/test_half.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/scheduler/test_partial_chunks.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/scheduler/test_resets.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/scheduler/test_step_loads.py": ("0.32", "0.33"),
    "connector/tests/engine/shared_tiers/test_events.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/test_connector_base.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/test_generation.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/test_spec_base.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/v030": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/v030/test_windows.py": ("0.32", "0.33"),
    "connector/tests/engine/worker/test_copy_jobs.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/worker/test_shares.py": ("0.30", "0.32", "0.33"),
    "connector/tests/engine/worker/test_step_loads.py": ("0.32", "0.33"),
    "connector/tests/engine/worker/test_transports.py": ("0.30", "0.32", "0.33"),
    "tests/engine_lives": ("0.32", "0.33"),
    "tests/generations": ("0.30", "0.32"),
    "tests/generations/test_refusals.py": ("0.30", "0.32", "0.33"),
    "tests/node_tier/test_schedules.py": ("0.32",),
    "tests/stock_tiers": ("0.30", "0.32", "0.33"),
    "tests/stock_tiers/test_engine.py": ("0.30", "0.32"),
    "tests/types": ("0.32",),
    "tests/upstream": ("0.32", "0.33"),
}
# Of these, versions whose engine does not run here, for want of a build with kernels for CPUs: tests that start none.
WITHOUT_ENGINE = ("0.33",)
# Of the cells of tests/generations, those that the lane `other-vllm` runs: what no other test of it shows. `make
# test-generations` runs all of them.
CELLS_TESTED = ("test_several_kv_groups", "test_two_ranks")
# Tests over a whole stack that the lane `other-vllm` runs once more, with engines of that version (VLLM=), all else of
# the local environment; test_doctor.py, test_metrics.py and test_upgrade.py with one engine of it and one of the local
# version.
STACK_TESTS = (
    "tests/e2e/test_doctor.py",
    "tests/e2e/test_metrics.py",
    "tests/e2e/test_upgrade.py",
)

# A word of a command line, without its folder -> the need that it implies.
PROGRAMS: dict[str, str] = {
    "valkey-server": "valkey",
    "helm": "helm",
    "kubectl": "cluster",
    "spillway_gateway": "servers",
    "spillway_simulator": "servers",
    "engine_lives": "vllm",
    "engine_matrix.engine_run": "engines",
    "engine_matrix.adapter_run": "engines",
    "engine_matrix.combined_run": "engines",
    "engine_matrix.weights_run": "engines",
    "engine_runs.py": "engines",
}


# What docs/reliability.md names and no lane runs -> its lane there. Everything else there is a test file.
BY_HAND: dict[str, str] = {
    "make bench-attack": "by hand",
    "make bench-corruption": "by hand",
    "make bench-soak": "by hand",
    "make test-adapters": "by hand",
    "make test-ascend-acceptance": "by hand",
    "make test-chain": "by hand",
    "make test-chaos": "by hand",
    "make test-experts": "by hand",
    "make test-models": "by hand",
    "make test-node-tier": "by hand",
    "make test-random": "by hand",
    "make test-real-engines": "by hand",
    "make test-selfcheck": "by hand",
    "make bench-gpu": "by hand on CUDA",
    "make test-models PLATFORM=cuda": "by hand on CUDA",
    "python -m spillway_connector.device.npu_probe": "by hand on Ascend",
}


class NoRule(LookupError):
    """A test file in a folder that RULES does not name."""


def nearest(table: Mapping[str, tuple[str, ...]], place: PurePath) -> tuple[str, ...]:
    """The entry of a file or folder, or else of the nearest folder around it that has one; () without any."""
    return next((table[named.as_posix()] for named in (place, *place.parents) if named.as_posix() in table), ())


@cache
def needs_of(path: Path) -> frozenset[str]:
    """Markers of a test file, without NOTHING. Raises NoRule."""
    place = PurePath(path).relative_to(ROOT)
    if found := nearest(RULES, place):
        return frozenset(found) - {NOTHING}
    raise NoRule(
        f'{place.parent.as_posix()}: no entry in tests/lanes/rules.py; add "{place.parent.as_posix()}" '
        f"to RULES with what its tests need: {', '.join(NEEDS)}"
    )


def lane_of(needs: Iterable[str]) -> Lane:
    order = list(Lane)
    return max((NEEDS[need][0] for need in needs), key=order.index, default=Lane.UNIT)


def other_vllm_of(path: Path) -> tuple[str, ...]:
    """The other versions that run a test file."""
    return nearest(OTHER_VLLM, PurePath(path).relative_to(ROOT))


def holds_other_vllm(folder: Path, vllm: str) -> bool:
    """Whether this version runs something of this folder, or of what is in it."""
    place = PurePath(folder).relative_to(ROOT)
    return any(vllm in versions and PurePath(named).is_relative_to(place) for named, versions in OTHER_VLLM.items())


def lanes_below(folder: Path) -> set[Lane]:
    """The lanes of the rules for this folder and everything in it."""
    place = PurePath(folder).relative_to(ROOT)
    inside = [needs for named, needs in RULES.items() if PurePath(named).is_relative_to(place)]
    return {lane_of(needs) for needs in (nearest(RULES, place), *inside) if needs}


def needs_of_command(words: Sequence[str]) -> frozenset[str]:
    return frozenset(PROGRAMS[name] for word in words if (name := PurePath(word).name) in PROGRAMS)
