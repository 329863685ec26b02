"""Prefill and decode apart, or not: the same engines and the same arrivals, one gateway after another.

    PYTHONPATH=bench:... python -m system.disaggregation --model FOLDER [--engines 2] [--tiny]
        [--systems plain always auto auto_both] [--mixes prefill_heavy decode_heavy mixed] [--seconds 15]
        [--store nvme|node] [--shared-folder /dev/shm/spillway-bench] [--engine-set KEY=VALUE ...]
        [--gateway-set KEY=VALUE ...] [--windows 5]
        [--killed-requests 200 --killed-seconds 240 [--ends kill stop drain] [--gpus 2]]

The engines start once and share one NVMe tier, or with `--store node` one CPU tier; roles and decisions are settings of
the gateway. Systems: `plain`, no roles; `always` and `auto`, one half of the engines prefill and the other one decode;
`auto_strict`, the same with `strictRoles`; `auto_both`, one half both and the other one decode. `nixl` and `nixl_plain`
are measured at the end on a second start of engines: their only connector is vLLM's NixlConnector, without any tier,
and the gateway hands over with it (`nixl`), or they have no roles. In turns, for each system:

1. Quiet: conversations of two turns, one after the other. First tokens of both turns, the hand-over, and which share of
   the first turn (its answer too) is cached in the second one: at the client, and on the prefill engines.
2. Each mix: requests arrive at a rate, whatever the answers take. Times to the first token, times between tokens, and
   goodput, which counts requests within a bound of both.

A name may be given several times: `--systems plain auto_both plain auto_both` shows how far runs of one system differ.
Figures are then those of all its requests, `..._by_run_...` compares runs of the same number, which have the same
arrivals, and conversations are asked in the first run alone.

`--windows` has the gateways of all systems run at once over the engines, and gives them the mixes in turns, so many
times, without conversations: `plain`, `auto`, then `auto`, `plain`. One window begins when the last one's requests are
answered, and no prompt comes twice. A mix that is given twice comes twice as often. `..._by_run_mean` is the geometric
mean of the ratios of windows with the same arrivals, `..._by_run_standard_error` its standard error. The first tokens
of each window are written to WORK/windows.json.

A hand-over lasts from the end of the first leg until the second one's engine was chosen; its median is interpolated
within the metric's buckets. `--killed-requests` adds, at the end, requests while engines of both sides end or hang
(legs_killed.py); `--systems` without a name measures these alone. Writes OUTPUT (flat; units are in the keys), also
`auto` over the better of `plain` and `always`. `--tiny`: CPU engines and a small load, as `make bench-disaggregation`
does with the bundled model. device.md says how to carry it to a machine with GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from system import device_run
from system.device_run import BLOCK_TOKENS, Ports, Processes, RealSystem, counters, read
from system.legs_killed import ENDS, Engines, killed
from system.legs_load import Kind, LegsLoad, Timed
from system.legs_report import Run, Runs, compared, legs_counted, median_of_buckets, table
from system.legs_scale import CUDA, TINY, Scale
from system.legs_systems import DEFAULT_SYSTEMS, SYSTEMS, Way
from system.report import percentile

SYSTEMS_OF_STORES = {
    "nvme": RealSystem("one", spillway=True, shared="nvme"),
    "node": RealSystem("one", spillway=True),
}
NIXL = {"connector": "NixlConnector"}
STORE_METRICS = ("spillway_gateway_engine_shared_stores", "spillway_gateway_engine_node_blocks")
STORES_KNOWN_SECONDS = 60.0
CACHED = "vllm:prompt_tokens_cached_total{}"
INDEX_BLOCKS = "spillway_gateway_index_blocks{"
HAND_OVER = "spillway_gateway_hand_over_seconds"


def gateway_document(options: argparse.Namespace, way: Way, beside: int = 0) -> dict[str, Any]:
    """spillway_gateway's configuration file of one system. beside: so many other gateways."""
    document = device_run.gateway_document(options)
    document["listen"]["port"] = Ports(options.first_port).gateway(beside)
    engines = document["models"][0]["engines"]
    for at, engine in enumerate(engines):
        engine["role"] = way.roles[2 * at // len(engines)]
    terms: dict[str, Any] = {"mode": way.mode, "strictRoles": way.strict}
    terms["uncachedTokensMin"] = options.scale.uncached_tokens_min
    if way.nixl:
        terms["handOver"] = "connector"
    document["disaggregation"] = {**terms, **document.get("disaggregation", {})}
    return document


def engines_with_stores(page: str) -> int:
    """Engines of which the gateway knows the store that they load from."""
    shared, node = STORE_METRICS
    return len(
        {
            sample.labels["engine"]
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == node or (sample.name == shared and sample.value > 0)
        }
    )


async def conversations(load: LegsLoad, scale: Scale, prefill_urls: Sequence[str]) -> dict[str, float]:
    """Conversations of two turns, one after the other, and the figures of them."""
    turn, firsts, seconds, shares, on_prefill = scale.turn, [], [], [], 0.0
    again = Kind(turn.prompt_tokens + turn.answer_tokens + scale.new_tokens, 16, 0.0)
    reusable = (turn.prompt_tokens + turn.answer_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    async with load.session() as http:
        for _ in range(scale.conversations):
            prompt = load.prompt(turn.prompt_tokens)
            first = await load.ask(http, prompt, turn)
            await asyncio.sleep(scale.settle_seconds)
            before = cached_on(prefill_urls)
            second = await load.ask(http, prompt + first.ids + load.prompt(scale.new_tokens), again)
            on_prefill += cached_on(prefill_urls) - before
            if first.error or second.error:
                raise SystemExit(f"a request of a quiet gateway failed: {first.error or second.error}")
            firsts.append(first.first_token_seconds)
            seconds.append(second.first_token_seconds)
            shares.append(min(1.0, second.cached_tokens / reusable))
    values = {
        "quiet_first_token_p50_seconds": percentile(firsts, 0.5),
        "quiet_second_turn_first_token_p50_seconds": percentile(seconds, 0.5),
        "second_turn_cached_share": sum(shares) / len(shares),
    }
    if prefill_urls:
        values["second_turn_cached_share_on_prefill_engines"] = on_prefill / (reusable * scale.conversations)
    return values


def cached_on(urls: Sequence[str]) -> float:
    """Tokens of prompts that engines found."""
    return sum(counters(read(f"{url}/metrics")).get(CACHED, 0.0) for url in urls)


@contextmanager
def gateway(options: argparse.Namespace, way: Way, name: str, beside: int = 0) -> Iterator[str]:
    """The URL of one that knows the stores of all engines, which run. beside: so many other gateways."""
    folder, url = options.work, f"http://127.0.0.1:{Ports(options.first_port).gateway(beside)}"
    file, processes = folder / f"gateway-{name}.yaml", Processes(folder)
    file.write_text(json.dumps(gateway_document(options, way, beside), indent=1), encoding="utf-8")
    try:
        processes.start(f"gateway-{name}", [sys.executable, "-m", "spillway_gateway", "--config", str(file)])
        processes.wait_ready({f"gateway-{name}": f"{url}/ready"})
        if not way.nixl:
            wait_for_stores(url, options.engines)
        wait_for_blocks(url)
        yield url
        page = read(f"{url}/metrics")
        (folder / f"gateway-{name}-metrics.txt").write_text(page, encoding="utf-8")
    finally:
        processes.end(5.0)


def measure(options: argparse.Namespace, name: str, engine_urls: Sequence[str], number: int) -> Run:
    """One gateway over engines that run, from its start to its end. number: of the system's runs, from 0."""
    way, scale = SYSTEMS[name], options.scale
    with gateway(options, way, f"{name}-{number + 1}") as url:
        seed, longest = f"{options.seed} {name} {number}", scale.request_seconds
        load = LegsLoad(url, "model", options.vocabulary, seed, request_seconds=longest)
        half = len(engine_urls) // 2
        with_legs = way.mode == "always"
        run = Run({}, {})
        if not number:
            run.values |= asyncio.run(conversations(load, scale, engine_urls[:half] if with_legs else ()))
            run.values["quiet_hand_over_p50_seconds"] = median_of_buckets(read(f"{url}/metrics"), HAND_OVER)
        for mix in options.mixes:
            run.timed[mix] = arrived(options, load, name, mix, number)
        run.values |= of_gateway(url)
        return run


def arrived(options: argparse.Namespace, load: LegsLoad, name: str, mix: str, number: int) -> list[Timed]:
    """The requests of one mix. number: of the arrivals, which depend on nothing else."""
    kinds, times = options.scale.mixes()[mix], options.rate * options.engines / 2
    timed = asyncio.run(load.arriving(kinds, times, options.seconds, options.seed + number))
    for error in sorted({one.error for one in timed if one.error is not None})[:3]:
        print(f"   {name}, {mix}: failed: {error}", flush=True)
    return timed


def of_gateway(url: str) -> dict[str, float]:
    """Return the gateway's requests by number of legs, and its median hand-over, since its start."""
    page = read(f"{url}/metrics")
    counts = {"one_leg": legs_counted(page, "one"), "two_legs": legs_counted(page, "two")}
    found = {f"requests_of_{legs}": count for legs, count in counts.items()}
    return found | {"hand_over_p50_seconds": median_of_buckets(page, HAND_OVER)}


def measure_windows(options: argparse.Namespace, runs: Runs, *, nixl: bool) -> Iterator[None]:
    """Gateways of all systems of one sort at once, which get the mixes in turns: a Run for each window, added to
    `runs`. Yields after each round."""
    names = [name for name in dict.fromkeys(options.systems) if SYSTEMS[name].nixl is nixl]
    with ExitStack() as stack:
        urls = {name: stack.enter_context(gateway(options, SYSTEMS[name], name, at)) for at, name in enumerate(names)}
        longest = options.scale.request_seconds
        loads = {
            name: LegsLoad(url, "model", options.vocabulary, f"{options.seed} {name}", request_seconds=longest)
            for name, url in urls.items()
        }
        turns: Counter[str] = Counter()
        for _ in range(options.windows):
            for mix in options.mixes:
                for name in names if turns[mix] % 2 == 0 else reversed(names):
                    runs.add(name, Run({}, {mix: arrived(options, loads[name], name, mix, turns[mix])}))
                turns[mix] += 1
            for name, url in urls.items():
                runs.of(name)[0].values = of_gateway(url)
            yield


def first_tokens(runs: Runs, systems: Sequence[str]) -> dict[str, list[dict[str, list[list[float]]]]]:
    """Return by system and window: the mix, and of each request the length of its prompt and the seconds to its first
    token, in order of arrival."""
    return {
        name: [
            {
                mix: [[one.kind.prompt_tokens, round(one.first_token_seconds, 5)] for one in timed]
                for mix, timed in run.timed.items()
            }
            for run in runs.of(name)
        ]
        for name in systems
    }


def measure_killed(options: argparse.Namespace, engines: Engines) -> dict[str, float]:
    """Requests of two legs while engines end or hang."""
    with gateway(options, SYSTEMS["always"], "killed") as url:
        values = asyncio.run(
            killed(
                engines,
                url,
                load=LegsLoad(url, "model", options.vocabulary, f"{options.seed} killed"),
                requests=options.killed_requests,
                prompt_tokens=options.scale.killed_tokens,
                seconds=options.killed_seconds,
                request_seconds=options.scale.killed_request_seconds,
                ends=options.ends,
            )
        )
        return values | {"requests_of_two_legs": legs_counted(read(f"{url}/metrics"), "two")}


def wait_for_blocks(url: str) -> None:
    """Wait until the gateway knows what the warm-up has left, and so how long blocks are."""
    until = time.monotonic() + STORES_KNOWN_SECONDS
    while not any(value for key, value in counters(read(f"{url}/metrics")).items() if key.startswith(INDEX_BLOCKS)):
        if time.monotonic() > until:
            raise SystemExit("the gateway knows no block of its engines")
        time.sleep(0.1)


def wait_for_stores(url: str, engines: int) -> None:
    until = time.monotonic() + STORES_KNOWN_SECONDS
    while (known := engines_with_stores(read(f"{url}/metrics"))) < engines:
        if time.monotonic() > until:
            raise SystemExit(f"the gateway knows the shared store of {known} of {engines} engines")
        time.sleep(0.1)


async def warm_up(load: LegsLoad, scale: Scale) -> None:
    """An engine computes and stores prompts of each length, so that what is measured has nothing to compile."""
    kinds = [Kind(scale.long.prompt_tokens, 4, 0.0)] * 2 + [Kind(scale.short.prompt_tokens, 4, 0.0)] * 4
    async with load.session() as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.ask(http, load.prompt(kind.prompt_tokens), kind)) for kind in kinds]
    for error in (task.result().error for task in tasks):
        if error is not None:
            raise SystemExit(f"the warm-up failed: {error}")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--engines", type=int, default=2, help="an even number")
    parser.add_argument("--gpus", type=int, help="one for each engine by default; fewer are shared")
    parser.add_argument("--systems", nargs="*", choices=list(SYSTEMS), default=DEFAULT_SYSTEMS)
    parser.add_argument("--mixes", nargs="*", choices=list(CUDA.mixes()), default=list(CUDA.mixes()))
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals in each mix")
    parser.add_argument("--windows", type=int, default=0, metavar="TIMES", help="all gateways at once, in turns")
    parser.add_argument("--killed-requests", type=int, default=0, help="asked while engines end or hang")
    parser.add_argument("--ends", nargs="+", choices=list(ENDS), default=["kill"], help="of engines, in turns")
    parser.add_argument("--killed-seconds", type=float, default=240.0, help="from the first of them to the last")
    parser.add_argument("--rate", type=float, default=1.0, help="times the rates of arrivals")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=list(SYSTEMS_OF_STORES), default="nvme", help="node: the node's CPU tier")
    parser.add_argument("--shared-folder", type=Path, help="of that store (default: in WORK)")
    parser.add_argument("--nvme-max", default="64GiB")
    parser.add_argument("--device-blocks", type=int, default=2_000)
    parser.add_argument("--cpu-gib", type=float, default=16.0, help="of each engine, or of the node")
    parser.add_argument("--max-length", type=int, default=16_384)
    parser.add_argument("--batched-tokens", type=int, default=2_048, help="that an engine computes in one step")
    parser.add_argument("--load-format", default="dummy", help="dummy: random weights, which is as fast")
    parser.add_argument("--engine-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--gateway-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--end-seconds", type=float, default=2.0, help="of the engines, before they are killed")
    parser.add_argument("--work", type=Path, default=Path("build/bench/disaggregation"))
    parser.add_argument("--output", type=Path, default=Path("build/bench/disaggregation.json"))
    parser.add_argument("--first-port", type=int, default=18_100)
    parser.add_argument("--tiny", action="store_true", help="CPU engines, short prompts, low rates")
    options = parser.parse_args(arguments)
    options.scale = TINY if options.tiny else CUDA
    if options.engines < 2 or options.engines % 2:
        parser.error(f"--engines {options.engines} given, an even number needed")
    options.gpus = options.gpus or options.engines
    if options.engines % options.gpus:
        parser.error(f"--gpus {options.gpus} given, a divisor of {options.engines} needed")
    options.gpu_memory_share = device_run.GPU_MEMORY_SHARE * options.gpus / options.engines
    if options.tiny:
        options.max_length, options.device_blocks, options.cpu_gib, options.nvme_max = 4_096, 48, 0.5, "2GiB"
    configuration = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    options.vocabulary = configuration["vocab_size"]
    options.work = options.work.absolute()
    options.shared_folder = (options.shared_folder or options.work).absolute()
    return options


def engine_document(options: argparse.Namespace, at: int, *, nixl: bool = False) -> dict[str, Any]:
    """spillway_engine's configuration file of one engine. nixl: NIXL's connector is its only one."""
    document = device_run.engine_document(options, SYSTEMS_OF_STORES[options.store], options.shared_folder, at)
    if nixl:
        document["offload"], document["kvTransfer"] = {"enabled": False}, NIXL
    elif options.store == "node":
        offload = document["offload"]
        path = str(options.shared_folder / "node")
        offload["nodeTier"] = {"path": path, "bytes": offload["cpuBytes"], "fallback": "refuse"}
    if options.tiny:
        document["model"]["dtype"] = "float32"  # answers are compared up to a rounding that bfloat16 of CPUs exceeds
    else:
        kept = [each for each in document["extraArgs"] if not each.startswith("--max-num-batched-tokens=")]
        document["extraArgs"] = [*kept, f"--max-num-batched-tokens={options.batched_tokens}"]
    return document


def run(options: argparse.Namespace, written: dict[str, float], runs: Runs, *, nixl: bool) -> None:
    """Every system of one sort on the same engines; adds to `written` and `runs`."""
    folder = options.work / "nixl" if nixl else options.work
    folder.mkdir(parents=True, exist_ok=True)
    ports, processes = Ports(options.first_port), Processes(folder)
    engine_urls = [f"http://127.0.0.1:{ports.engine(at)}" for at in range(options.engines)]
    stored, began = options.shared_folder / options.store, time.monotonic()
    each_gpu = 1 if options.tiny else options.engines // options.gpus
    shutil.rmtree(stored, ignore_errors=True)  # what an earlier run has stored would be found

    def start_engine(at: int) -> None:
        file = folder / f"engine-{at}.yaml"
        file.write_text(json.dumps(engine_document(options, at, nixl=nixl), indent=1), encoding="utf-8")
        sets = [part for each in options.engine_set for part in ("--set", each)]
        variables = {"PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
        if nixl:
            variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports.nixl(at))
        if not options.tiny:
            variables["CUDA_VISIBLE_DEVICES"] = str(at // each_gpu)
        processes.start(
            f"engine-{at}", [sys.executable, "-m", "spillway_engine", "--config", str(file), *sets], variables
        )

    def add(name: str, values: Mapping[str, float]) -> None:
        written.update({f"{name}_{figure}": round(value, 5) for figure, value in values.items()})
        options.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"   {name}: after {time.monotonic() - began:.0f} s", flush=True)

    try:
        for place in range(each_gpu):  # vLLM measures the memory of a device while it starts: one after the other
            starting = range(place, options.engines, each_gpu)
            for at in starting:
                start_engine(at)
            processes.wait_ready({f"engine-{at}": f"{engine_urls[at]}/ready" for at in starting})
        print(f"   engines are ready after {time.monotonic() - began:.0f} s", flush=True)
        for at, url in enumerate(engine_urls):
            asyncio.run(warm_up(LegsLoad(url, "model", options.vocabulary, f"warm {at}"), options.scale))
        if options.windows:
            for _ in measure_windows(options, runs, nixl=nixl):
                names = [name for name in dict.fromkeys(options.systems) if runs.of(name)]
                (options.work / "windows.json").write_text(json.dumps(first_tokens(runs, names)), encoding="utf-8")
                for name in names:
                    add(name, runs.figures(name))
        for name in () if options.windows else options.systems:
            if SYSTEMS[name].nixl is nixl:
                runs.add(name, measure(options, name, engine_urls, len(runs.of(name))))
                add(name, runs.figures(name))
        if options.killed_requests and not nixl:
            add("killed", measure_killed(options, Engines(processes, start_engine, engine_urls)))
    finally:
        processes.end(options.end_seconds)
        shutil.rmtree(stored, ignore_errors=True)


def show(options: argparse.Namespace, written: dict[str, float], runs: Runs, systems: Sequence[str]) -> None:
    """Compare what has run until now, and add it to `written`."""
    beside = compared(written, systems, list(dict.fromkeys(options.mixes))) | runs.paired()
    written |= {key: round(value, 4) for key, value in beside.items()}
    options.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if systems:
        print(table(written, systems))
    for key, value in written.items():
        if key in beside or key.startswith("killed_"):
            print(f"{key} {value:.3f}")


def main(arguments: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the engines end too
    options = parsed(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    options.shared_folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    scale = options.scale
    written: dict[str, float] = {
        "engines": options.engines,
        "seconds_of_a_mix": options.seconds,
        "prompt_tokens": scale.long.prompt_tokens,
        "bound_of_first_token_seconds": scale.first_token_bound_seconds,
        "bound_of_token_seconds": scale.token_bound_seconds,
        "processors": os.cpu_count() or 0,
    }
    runs, systems = Runs(options.seconds, scale), list(dict.fromkeys(options.systems))
    sorts = {SYSTEMS[name].nixl for name in systems} | ({False} if options.killed_requests else set())
    for nixl in sorted(sorts):
        run(options, written, runs, nixl=nixl)
        show(options, written, runs, [name for name in systems if runs.of(name)])
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
