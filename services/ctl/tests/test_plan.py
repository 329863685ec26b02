"""`spillway plan` on what the chart renders: its arithmetic as it is, and words for what cannot be."""

import io
import json
import stat

import pytest
import yaml

from spillway_ctl.command import main
from spillway_ctl.plan_input import CUSTOM_KINDS

MEMORY = {
    "kvDtype": "bfloat16",
    "bytesPerToken": 163_840,
    "chunkTokens": 128,
    "cpuRowBytes": 20_971_520,
    "cpuTierBytes": 20_971_520_000,
    "cpuChunks": 1_000,
    "cpuTierTokens": 128_000,
    "sharedMemoryBytes": 24 << 30,
    "podNeedsBytes": 40 << 30,
    "memoryLimitBytes": 48 << 30,
}


def rendered(tier: str = "redis", **offload: object) -> str:
    settings = {
        "model": {"servedName": "Qwen3-14B", "maxLength": 32_768},
        "offload": {"enabled": True, "sharedTier": {"type": tier}, **offload},
    }
    data = {"engine.yaml": yaml.safe_dump(settings), "memory.json": json.dumps(MEMORY)}
    engine = {"kind": "ConfigMap", "metadata": {"name": "chat-engine"}, "data": data}
    other = {"kind": "ConfigMap", "metadata": {"name": "chat-gateway"}, "data": {"gateway.yaml": "listen: {}"}}
    return yaml.safe_dump_all([{"kind": "Service"}, other, engine])


@pytest.fixture
def plan(monkeypatch, capsys):
    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["plan", "--rendered", "-", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_without_rates_it_tells_memory_and_break_even_per_thousand_tokens(plan):
    code, out, _ = plan(rendered())

    assert code == 0
    assert "Qwen3-14B (chat-engine)" in out and "1,000 chunks, 128,000 tokens" in out
    assert "40.0 GiB needed, limit 48.0 GiB" in out
    assert "163,840 B in bfloat16" in out
    assert "above 156.2 MiB/s for every 1,000 tokens/s of prefill" in out
    assert "first token" not in out


def test_the_index_of_a_tier_is_told_where_it_takes_memory(plan, monkeypatch):
    monkeypatch.setitem(MEMORY, "tierIndexBytes", 25 << 20)

    _, out, _ = plan(rendered("nvme"))

    assert "nvme, 25.0 MiB of a pod's memory for its index" in out


def test_a_node_is_planned_with_its_tier_and_engines(plan, monkeypatch):
    monkeypatch.setitem(MEMORY, "nodeTierBytes", 64 << 30)

    _, out, _ = plan(rendered())

    assert "64.0 GiB: 3,276 chunks, 419,328 tokens, for all of its engines" in out
    assert "by engines on it: 1 113.0 GiB, 4 257.0 GiB, 8 449.0 GiB" in out


def test_with_rates_it_tells_first_tokens(plan):
    rates = ["--prefill-tokens-per-second", "1000", "--device-copy-rate", "1GiB/s", "--tier-rate", "100MiB/s"]

    code, out, _ = plan(rendered(), *rates, "--prompt-tokens", "1025")

    assert code == 0
    assert "6.6 times as fast as computing" in out
    assert "0.6 times as fast as computing: slower than computing, so it is recomputed" in out
    assert [word for word in out.splitlines()[-1].split() if word != "s"] == ["1,025", "1.025", "0.157", "1.757"]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["--tier-rate", "3GiB/s"], "the given rates; give --prefill-tokens-per-second too"),
        (["--tier-rate", "3GiB/s", "--prefill-tokens-per-second", "8000"], "--tier-rate; give --device-copy-rate too"),
        (["--device-copy-rate", "9GiB/s", "--prefill-tokens-per-second", "8000"], None),
    ],
)
def test_a_rate_that_is_no_use_alone_asks_for_the_other_one(plan, given, asked):
    code, out, _ = plan(rendered(), *given)

    assert code == 0
    assert [line.strip() for line in out.splitlines() if "not judged" in line] == (
        [f"{'not judged':<24}{asked}"] if asked else []
    )


def test_the_values_own_prefill_rate_is_used_unless_another_is_given(plan):
    values = rendered(prefillTokensPerSecond=2000)

    reported = json.loads(plan(values, "--json")[1])["engines"][0]
    overridden = json.loads(plan(values, "--json", "--prefill-tokens-per-second", "4000")[1])["engines"][0]

    assert reported["break_even_bytes_per_second"] == 2000 * 163_840
    assert overridden["break_even_bytes_per_second"] == 4000 * 163_840
    assert reported["memory"] == MEMORY
    assert [first["prompt_tokens"] for first in reported["first_tokens"]] == [2_048, 8_192, 32_768]


def test_a_tier_that_is_not_there_is_not_reckoned_with(plan):
    rates = ["--prefill-tokens-per-second", "1000", "--device-copy-rate", "1GiB/s", "--tier-rate", "1GiB/s"]

    (engine,) = json.loads(plan(rendered("none"), "--json", *rates)[1])["engines"]

    assert engine["rates"]["tier_read_bytes_per_second"] is None
    assert all(first["shared_tier_seconds"] is None for first in engine["first_tokens"])


def test_prompts_longer_than_the_model_takes_are_left_out(plan):
    reported = json.loads(plan(rendered(prefillTokensPerSecond=1), "--json", "--prompt-tokens", "100", "40000")[1])

    assert [first["prompt_tokens"] for first in reported["engines"][0]["first_tokens"]] == [100]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Service", "no engine is in what was rendered"),
        ("a: [", "cannot be read"),
        (yaml.safe_dump({"kind": "ConfigMap", "data": {"engine.yaml": "x", "memory.json": "{}"}}), "cannot be read"),
    ],
)
def test_what_is_no_rendering_is_refused(plan, text, words):
    code, out, error = plan(text)

    assert (code, out) == (2, "") and words in error


def test_values_beside_a_rendering_are_refused(plan):
    code, _, error = plan(rendered(), "--set", "a=b")

    assert code == 2 and "give -f and --set to helm template instead" in error


def test_the_chart_is_rendered_with_the_given_values(tmp_path, capsys):
    helm = tmp_path / "fake-helm"
    (tmp_path / "rendered.yaml").write_text(rendered())
    helm.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/rendered.yaml\n')
    helm.chmod(helm.stat().st_mode | stat.S_IXUSR)

    code = main(["plan", "--chart", "charts/x", "--helm", str(helm), "-f", "a.yaml", "-f", "b.yaml", "--set", "c=d"])

    assert code == 0 and "Qwen3-14B" in capsys.readouterr().out
    assert (tmp_path / "arguments").read_text().split() == [
        *("template", "plan", "charts/x", "--show-only", "templates/engine-configmap.yaml"),
        *(word for kind in CUSTOM_KINDS for word in ("-a", kind)),
        *("-f", "a.yaml", "-f", "b.yaml", "--set", "c=d"),
    ]


def test_what_helm_refuses_is_passed_on(tmp_path, capsys):
    helm = tmp_path / "fake-helm"
    helm.write_text("#!/bin/sh\necho 'engine.memory.limit is too little' >&2\nexit 1\n")
    helm.chmod(helm.stat().st_mode | stat.S_IXUSR)

    assert main(["plan", "--chart", "charts/x", "--helm", str(helm)]) == 2
    assert "engine.memory.limit is too little" in capsys.readouterr().err
    assert main(["plan", "--chart", "charts/x", "--helm", str(tmp_path / "none")]) == 2
    assert "no such program" in capsys.readouterr().err


def test_a_bucket_is_told_as_requests_and_at_given_prices_as_money(plan):
    code, out, _ = plan(rendered("s3"), "--prompt-tokens", "4096")
    assert code == 0
    assert "4,096 tokens: 32 PUT stored, 32 HEAD and 32 GET loaded" in out
    assert "cost" not in out

    _, out, _ = plan(rendered("s3"), "--prompt-tokens", "4096", "--put-price", "5", "--get-price", "0.4")
    assert "1,000 prompts cost stored 0.16, loaded 0.0256" in out

    assert "PUT" not in plan(rendered("redis"), "--prompt-tokens", "4096")[1]


def test_a_bucket_below_is_asked_for_each_chunk_before_it_is_stored(plan):
    text = rendered(sharedTier={"type": "redis", "below": {"type": "s3"}})
    prices = "--put-price", "5", "--get-price", "0.4"
    code, out, _ = plan(text, "--prompt-tokens", "4096", *prices)
    assert code == 0
    assert ["tier", "below", "it", "s3"] in [line.split() for line in out.splitlines()]
    assert "4,096 tokens: 32 HEAD and 32 PUT stored, 32 HEAD and 32 GET loaded" in out
    assert "1,000 prompts cost stored 0.173, loaded 0.0256" in out


def test_a_drafter_adds_layers_and_the_window_before_a_prompts_last_chunk(plan, monkeypatch):
    """16 chunks of 128 tokens: 16 of full attention, and of the window 3, or 4 if the last chunk is computed again."""
    groups = {"groups": [[1, 0], [1, 256]], "kvGroups": 2}
    for more, stored, words in (({}, 19, ""), ({"draftLayers": 2}, 20, ", a drafter's 2 layers included")):
        for key, value in (groups | more).items():
            monkeypatch.setitem(MEMORY, key, value)
        _, out, _ = plan(rendered(), "--prompt-tokens", "2048")
        assert f"163,840 B in bfloat16{words}\n" in out
        _, out, _ = plan(rendered(), "--prompt-tokens", "2048", "--json")
        (prompt,) = json.loads(out)["engines"][0]["prompts"]
        assert prompt["stored_bytes_per_token"] == round(stored * MEMORY["cpuRowBytes"] / 2048)
