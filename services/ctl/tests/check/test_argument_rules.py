"""`spillway check` and the engine service, wherever it is configured, refuse the same arguments of vLLM."""

import pytest

from spillway_connector.setting_names import PLAIN_NAMES
from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings
from spillway_engine import extra_arguments
from spillway_engine.errors import SettingsError

REFUSED = [
    "--model=/m",
    "--served_model_name",
    "--dtype",
    "--dtype=half",
    "--kv_cache_dtype=fp8",
    "--quantization",
    "-q=awq",
    "-qawq",
    "--enable-lora",
    "--lora-modules",
    "--lora_modules=a=/a",
    "--max-loras=2",
    "--max_lora_rank=8",
    "--max-cpu-loras",
    "--max-model-len=1",
    "--max_model_len",
    "--seed",
    "--host",
    "--port=1",
    "--block_size=16",
    "--num-gpu-blocks-override=2",
    "--tensor-parallel-size",
    "--tensor_parallel_size=2",
    "-tp",
    "-tp=2",
    "-t",
    "--kv-events-config={}",
    "--kv-transfer-config={}",
    "--kv_transfer_config.kv_role",
    "--kv-transfer-config.kv_connector=X",
    "--kv-trans",
    "--kv-offloading-size=4",
    "--kv_offloading_backend",
    "--prefix-caching-hash-algo=builtin",
    "--prefix_caching_hash",
    "--prefix-match-unit=16",
    "--config",
    "--config=a.yaml",
    "--api-key",
    "--api-key=x",
    "--api_key=x",
    "--api-key x",
    "--api-k=x",
    "--hf-token=x",
    "--hf_token",
    "--proxy_password=x",
    "--registry-token=x",
    "--kv-cache-memory-bytes=5",
    "--pipeline-parallel-size=2",
    "-pp=2",
    "--decode_context_parallel_size=2",
    "-pcp=2",
    "--data-parallel-size",
    "--data-parallel-size=2",
    "--data_parallel_size=2",
    "--data-parallel-si=2",
    "-dp",
    "-dp=2",
    "--data_parallel_size_local=2",
    "-dpl=2",
    "--data-parallel-rank=1",
    "-dpn=1",
    "--data-parallel-start-rank=1",
    "-dpr=1",
    "--data-parallel-address=h",
    "-dpa=h",
    "--data_parallel_rpc_port=9",
    "-dpp=9",
    "--data-parallel-backend=ray",
    "-dpb=ray",
    "--data-parallel-hybrid-lb",
    "-dph",
    "--data-parallel-external-lb",
    "-dpe",
    "--data-parallel-multi-port-external-lb",
    "-dpm",
    "--data-parallel-supervisor-port=9",
    "--nnodes=2",
    "-n2",
    "-dp2",
    "-tp4",
    "--help",
    "-h",
    "--enable-prefix-caching=true",
    "-r=1",
    "--api-server-count=2",
    "-asc=2",
    "--ssl-keyfile=k",
    "--ssl_certfile=c",
    "--uds=/s",
    "--headless",
    "--no-enable-prefix-caching",
    "--no_enable_prompt_tokens_details",
    "--max-num-seqs 8",
    "--max-num-seqs\t8",
    "--max-num-seqs 8=",
]
UNTAKEN = [
    ["vllm", "--enforce-eager"],
    ["--max-num-seqs=8", "9"],
    ["8", "--max-num-seqs=8"],
]
ACCEPTED = [
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens=512",
    "--enforce-eager",
    "--model-impl=vllm",
    "--middleware",
    "a.b",
    "--allow-credentials",
    "-O3",
    "-cc.mode=3",
    "-cc.backend=inductor",
    '--speculative-config={"method": "ngram"}',
    "--attention-config.backend",
    "FLASH_ATTN",
    "-ep",
    "--max_num_partial_prefills=2",
    "--tokenizer",
    "a b",
    "-1",
    "-",
    "--",
    "a=--model",
]


def refused(arguments: list[str], **values: object) -> list[str]:
    """Sentences about these arguments."""
    given = values or {"engine": {"accelerator": {"preset": "cpu"}, "extraArgs": arguments}}
    return [each.sentence for each in findings(given, Cluster()) if ".extraArgs" in each.setting]


def test_every_argument_that_is_refused_is_refused_by_both() -> None:
    sentences = "\n".join(refused(REFUSED))

    for argument in REFUSED:
        assert f": {extra_arguments.argument_name(argument)} " in sentences
        with pytest.raises(SettingsError):
            extra_arguments.check_extra_arguments([argument], PLAIN_NAMES)


@pytest.mark.parametrize("arguments", UNTAKEN, ids=" ".join)
def test_a_value_that_no_flag_takes_is_refused_by_both(arguments: list[str]) -> None:
    """vLLM would take it for the name of the model."""
    [index] = [place for place, argument in enumerate(arguments) if not argument.startswith("-")]
    problem = f"extraArgs[{index}]: no flag before it takes this value; write --flag=value, or flag and value as two"

    [sentence] = refused(arguments)
    assert sentence.startswith(f"engine.{problem}")
    with pytest.raises(SettingsError) as engine:
        extra_arguments.check_extra_arguments(arguments, PLAIN_NAMES)
    assert str(engine.value).startswith(problem)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-sc", "{}", "--speculative-config={}"], "-sc and --speculative-config are one argument"),
        (
            ["--speculative_config={}", "--speculative-config.method=mtp"],
            "--speculative-config and --sp",
        ),
        (["-sc.method=mtp", "--speculative-config.model", "a/b"], "-sc.MEMBER and --speculative-config.MEMBER are one"),
        (["-cc.mode=3", "--compilation-config", '{"mode": 3}'], "-cc.MEMBER and --compilation-config are one argument"),
        (["-O3", "--optimization-level=2"], "-O and --optimization-level are one argument"),
        (["--gpu-memory-utilization=.8", "--device-memory-utilization=.9"], "--gpu-memory-utilization and --device-m"),
        (["--device-memory-utilization=90"], "--gpu-memory-utilization: 90 given, a share"),
        (["-ep", "--enable-expert-parallel"], "-ep and --enable-expert-parallel are one argument"),
        (["--cpu-offload-g=40"], "--cpu-offload-g is short for --cpu-offload-gb"),
        (["--speculative_conf={}"], "--speculative-conf is short for --speculative-config"),
        (["--spec-m", "a/b"], "--spec-m is short for --spec-method"),
        (["-s={}"], "-s is short for -sc"),
    ],
)
def test_what_would_be_read_otherwise_than_vllm_reads_it_is_refused_by_both(arguments: list[str], problem: str) -> None:
    [sentence] = refused(arguments)
    assert sentence.startswith(f"engine.extraArgs: {problem}")
    with pytest.raises(SettingsError) as engine:
        extra_arguments.check_extra_arguments(arguments, PLAIN_NAMES)
    assert str(engine.value).startswith(f"extraArgs: {problem}")


def test_no_spelling_of_a_secret_reaches_a_sentence() -> None:
    sentences = refused(["--api_key=sk-123", "--api-key sk-123", "--api-k=sk-123", "--x_password=sk-123"])

    assert len(sentences) >= 3 and not any("sk-123" in sentence for sentence in sentences)


def test_every_other_argument_is_taken_by_both() -> None:
    assert refused(ACCEPTED, engine={"image": {"tag": "own"}, "extraArgs": ACCEPTED}) == []
    extra_arguments.check_extra_arguments(ACCEPTED, PLAIN_NAMES)


def test_a_group_of_engines_is_told_of_its_own_values() -> None:
    sentences = refused([], engines={"chat": {"extraArgs": ["--host=::", "--dtype=half"]}})

    assert sentences == [
        "engines.chat.extraArgs: --host is decided by listenAddress; change that instead",
        "engines.chat.extraArgs: --dtype is decided by engines.chat.model.dtype; change that instead",
    ]
