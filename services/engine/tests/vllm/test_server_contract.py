"""vLLM's API server takes the command line that the engine service writes, and has the arguments that it refuses from
people. Run on every supported vLLM: the next one breaks a test here, not an engine."""

from __future__ import annotations

import importlib.util
import json
from typing import Any, get_args

import pytest
import yaml
from lanes.rules import ROOT

from spillway_connector.setting_names import PLAIN_NAMES
from spillway_engine.argument_verdicts import ServerParser, argument_verdicts, installed_parser
from spillway_engine.drafters import drafter_of
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import DECIDED_BY_A_SETTING, LONG_NAMES, SECRET, WHY_FIXED, check_extra_arguments
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import plan_memory
from spillway_engine.model_shape import ModelShape
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings
from spillway_engine.vllm_arguments import MIDDLEWARE, SERVER_MODULE, server_arguments
from spillway_settings.values.engine import KvCacheDtype, LoraRank

SHAPE = ModelShape(30, 3, 64, None, "bfloat16", 8192, 0)
MACHINES = {
    "cpu": Machine("cpu", frozenset({"avx512_bf16"}), (0, 1), 12 << 30, "MemAvailable", 6 << 30, 6 << 30),
    "npu": Machine("npu", frozenset(), tuple(range(64)), 1 << 40, "MemAvailable", 1 << 40, 1 << 40),
}
TREE: dict[str, Any] = {
    "name": "engine-3",
    "model": {"path": "/models/x", "servedName": "m"},
    "deviceBlocks": 80,
    "offload": {"numCpuBlocks": 96, "sharedTier": {"type": "redis", "redis": {"url": "redis://cache:6379/0"}}},
    "extraArgs": ["--max-num-seqs", "8"],
}
NAMES = ROOT / "services/ctl/src/spillway_ctl/check/facts/vllm-names.yaml"
REFUSED = {*DECIDED_BY_A_SETTING, *WHY_FIXED, *SECRET}
NOT_EVERYWHERE = {"--prefix-match-unit"}  # of vLLM 0.30 and later
NOT_ALONE = "--enable-auto-tool-choice"  # the server wants a parser with it
AMBIGUOUS = "-dc"  # --diffusion-config, which is taken, in vLLM 0.30 and later; a beginning of -dcp in 0.23


MISTAKES = {
    name: case
    for name, case in yaml.safe_load((ROOT / "tests" / "chart" / "mistakes.yaml").read_text()).items()
    if "startSays" in case
}


@pytest.fixture(scope="module")
def server() -> ServerParser:
    return installed_parser()


@pytest.fixture(scope="module")
def parser(server: ServerParser) -> Any:
    return server.parser


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_argument_is_refused_in_plain_words(server: ServerParser, mistake: str) -> None:
    engine = MISTAKES[mistake]["values"]["engine"]
    verdicts = argument_verdicts(engine["extraArgs"], server)
    text = "\n".join(f"{verdict.setting}: {verdict.problem}; {verdict.remedy}" for verdict in verdicts)

    if engine.get("image", {}).get("vllm", server.version) != server.version:
        assert verdicts == []
        return
    assert all(words.replace("vLLM 0.23", f"vLLM {server.version}") in text for words in MISTAKES[mistake]["startSays"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-cc.mod=3"], "-cc.mod: mod is no key of CompilationConfig; did you mean mode?"),
        (["--attention-config.backend", "FLASH"], "Unknown attention backend: 'FLASH'. Valid options are"),
        (["--max-num-seqs", "8", "9"], "extraArgs[2]: no flag before it takes this value"),
        (["--kv_cache_dtype=fp9"], '--kv-cache-dtype: "fp9" given, one of auto, bfloat16'),
        (["--max-num"], "--max-num is the beginning of --max-num-batched-tokens, "),
        (["--atention-config.backend", "X"], "--atention-config.backend is no argument of vLLM"),
    ],
)
def test_what_vllm_says_of_a_value_is_kept(server: ServerParser, arguments: list[str], sentence: str) -> None:
    [verdict] = argument_verdicts(arguments, server)

    assert sentence in f"{verdict.setting}: {verdict.problem}; {verdict.remedy}"


def test_what_vllm_takes_is_not_refused(server: ServerParser) -> None:
    taken = ["--max-num-seqs", "8", "-O3", "-cc.mode=3", "--compilation-config", '{"mode": 3}', "--max-logprobs", "-1"]
    taken += ['--speculative-config={"method": "ngram"}', "--middleware", "a.b", "--attention-config.backend"]
    taken += ["FLASH_ATTN", "-ep", "--max_num_batched_tokens=8k", "--no-enforce-eager", "--allowed-origins", '["*"]']

    assert argument_verdicts(taken, server) == []


def test_the_server_takes_adapters_and_quantisation(parser: Any) -> None:
    adapters = [{"name": "support", "path": "/adapters/support"}, {"name": "sql", "path": "owner/sql"}]
    model = {**TREE["model"], "kvCacheDtype": "fp8", "quantization": "fp8"}
    lora = {"adapters": adapters, "maxRank": 64, "maxActive": 2, "maxInMemory": 8}
    settings = read_settings(EngineSettings, {**TREE, "model": model, "lora": lora})
    machine = MACHINES["npu"]
    given = parser.parse_args(server_arguments(settings, machine, plan_memory(settings, SHAPE, machine)))

    assert [(each.name, each.path, each.base_model_name) for each in given.lora_modules] == [
        ("support", "/adapters/support", "m"),
        ("sql", "owner/sql", "m"),
    ]
    assert (given.enable_lora, given.max_lora_rank, given.max_loras, given.max_cpu_loras) == (True, 64, 2, 8)
    assert (given.kv_cache_dtype, given.quantization) == ("fp8", "fp8")


def test_the_chart_knows_the_names_of_methods_and_connectors() -> None:
    """A name of this vLLM would be taken for a misspelt one if the chart did not know it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    names = {kind: set(text.split()) for kind, text in yaml.safe_load(NAMES.read_text()).items()}

    assert set(QUANTIZATION_METHODS) <= names["quantization"]
    assert set(KVConnectorFactory._registry) <= names["connectors"] | {"SpillwayConnector"}


def test_the_server_knows_every_kv_dtype_and_rank(parser: Any) -> None:
    """The server takes every value that the settings accept, so that none is refused only when the engine starts."""
    for dtype in get_args(KvCacheDtype):
        assert parser.parse_args(["--kv-cache-dtype", dtype]).kv_cache_dtype == dtype
    for rank in get_args(LoraRank):
        assert parser.parse_args(["--max-lora-rank", str(rank)]).max_lora_rank == rank


@pytest.mark.parametrize("platform", MACHINES)
def test_the_server_takes_our_command_line(parser: Any, platform: str) -> None:
    settings = read_settings(EngineSettings, {**TREE, "platform": platform})
    machine = MACHINES[platform]
    given = parser.parse_args(server_arguments(settings, machine, plan_memory(settings, SHAPE, machine)))

    assert (given.model, given.served_model_name, given.block_size) == ("/models/x", ["m"], 128)
    assert (given.num_gpu_blocks_override, given.max_num_seqs) == (80, 8)
    assert given.prefix_caching_hash_algo == "sha256_cbor"
    assert given.enable_prompt_tokens_details and given.disable_uvicorn_access_log
    assert given.middleware == [MIDDLEWARE]
    assert given.kv_events_config.topic == "kv-events"
    transfer = given.kv_transfer_config
    # vllm-ascend refuses other policies for hybrid models; the connector recomputes all the same.
    policy = "fail" if platform == "npu" else "recompute"
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == ("SpillwayConnector", policy)
    assert json.dumps(transfer.kv_connector_extra_config["secondary_tiers"])


def test_what_is_refused_from_people_exists(parser: Any) -> None:
    known = {name for action in parser._actions for name in action.option_strings}
    assert REFUSED - known <= NOT_EVERYWHERE


def is_refused(argument: str) -> bool:
    try:
        check_extra_arguments([argument], PLAIN_NAMES)
    except SettingsError:
        return True
    return False


def test_an_argument_is_refused_in_all_its_spellings_or_in_none(parser: Any) -> None:
    for action in parser._actions:
        names = {name for name in action.option_strings if not name.startswith("--no-")} - {AMBIGUOUS}
        assert len({is_refused(name) for name in names}) <= 1, names


def test_no_other_argument_is_refused(parser: Any) -> None:
    spellings = [set(action.option_strings) for action in parser._actions]
    others = {name for names in spellings if not REFUSED & names for name in names}

    assert len(others) > 200
    assert {name for name in others if is_refused(name)} <= {AMBIGUOUS, NOT_ALONE}


def test_each_further_name_of_an_argument_is_known(parser: Any) -> None:
    for action in parser._actions:
        names = [name for name in action.option_strings if not name.startswith("--no-") and not is_refused(name)]
        assert len({LONG_NAMES.get(name, name) for name in names}) <= 1, names


@pytest.mark.parametrize("order", [1, -1])
def test_of_an_argument_by_two_names_the_last_one_counts(parser: Any, order: int) -> None:
    """The engine service refuses both: of an argument as JSON and by its members, the members count wherever they
    stand."""
    both = ["-sc", '{"method": "eagle"}', '--speculative-config={"method": "ngram"}']
    arguments = both if order == 1 else [both[2], *both[:2]]
    drafter = drafter_of(arguments)
    assert drafter is not None
    assert parser.parse_args(arguments).speculative_config == {"method": drafter.method}
    members = ["--speculative-config.method", "mtp"]
    assert parser.parse_args([*members, *arguments]).speculative_config == {"method": "mtp"}


def test_the_server_is_a_module_that_can_be_run() -> None:
    assert importlib.util.find_spec(SERVER_MODULE) is not None


def test_the_completions_api_returns_what_the_start_up_check_reads() -> None:
    """Fields of requests and replies, by the names that self_check.py writes and likelihood.py reads."""
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionRequest,
        CompletionResponseChoice,
    )

    asked = {"prompt_logprobs", "logprobs", "return_token_ids", "cache_salt", "ignore_eos", "max_tokens"}
    assert asked <= CompletionRequest.model_fields.keys()
    answered = {"prompt_logprobs", "logprobs", "token_ids", "prompt_token_ids"}
    assert answered <= CompletionResponseChoice.model_fields.keys()
