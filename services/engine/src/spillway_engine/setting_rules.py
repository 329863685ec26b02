"""Rules between the settings of an engine. Pure.

The engine service and `spillway check` judge by `contradictions`: the one has its own settings, the other those of the
chart, and both have the same names here. Only the engine service asks the rest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

from spillway_connector.config import check_node_tier
from spillway_connector.errors import ConfigError
from spillway_connector.native_keys import BATCH_MEMCPY_VARIABLE
from spillway_connector.setting_names import SettingNames
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import argument_value, check_extra_arguments
from spillway_engine.kv_transfer import NOT_BESIDE
from spillway_engine.lora_settings import check_lora
from spillway_engine.settings import EngineSettings
from spillway_engine.tier_settings import SectionNames, check_shared_tier, refuse_credentials
from spillway_settings.byte_sizes import format_byte_count, parse_byte_count
from spillway_settings.values.engine import LEADER_PORTS, Engine, ranks_of_pod
from spillway_settings.values.offload import Offload

# Characters of lifecycle.selfCheckText: long enough to be measured, and shorter than a block of 128 tokens.
TEXT_CHARACTERS_MIN, TEXT_CHARACTERS_MAX = 16, 400
PORT_MAX = 65_535
LAYER_PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"  # of vLLM: layers of each pipeline stage


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One mistake.

    Attributes:
        setting: its path in the engine's settings.
        value: what was given, with which the problem's sentence goes on; None: the problem names it.
        problem: what it contradicts.
        remedy: what to change.
    """

    setting: str
    value: object
    problem: str
    remedy: str

    @property
    def joint(self) -> str:
        """The separator between the value and the problem."""
        return "" if self.problem.startswith(",") else " "

    def sentence(self, names: SettingNames) -> str:
        if self.value is None:
            return f"{names.name(self.setting)}: {self.problem}; {self.remedy}"
        return f"{names.given(self.setting, self.value)}{self.joint}{self.problem}; {self.remedy}"


def check_settings(settings: EngineSettings) -> EngineSettings:
    """Refuse contradictions that need no look at the machine. Returns the settings unchanged.

    Raises SettingsError with what to change.
    """
    if settings.block_size % 16:
        raise SettingsError(
            f"{settings.names.given('blockSize', settings.block_size)} is not a multiple of 16, as attention kernels "
            "need; 128 suits every platform"
        )
    if not settings.model.path:
        raise SettingsError(f"{settings.names.name('model.path')} is empty; set it to a model folder or a hub name")
    offload, names = settings.offload, settings.names
    if wrong := [each.sentence(names) for each in contradictions(settings, names)]:
        raise SettingsError("\n".join(wrong))
    _check_text(settings)
    check_extra_arguments(settings.extra_args, names)
    _check_cpu_binding(settings)
    if BATCH_MEMCPY_VARIABLE in settings.extra_env:
        raise SettingsError(
            f"{names.name('extraEnv')}: {BATCH_MEMCPY_VARIABLE} is read when vllm-ascend is built and does nothing "
            f"here; remove it, and set {names.name('offload.batchMemcpy')}: auto, on or off"
        )
    check_lora(settings.lora, settings.served_name, names)
    unread = {f"offload.extraTiers[{index}]": extra for index, extra in enumerate(offload.extra_tiers)}
    if settings.kv_transfer is not None:
        unread["kvTransfer.extraConfig"] = settings.kv_transfer.extra_config
    refuse_credentials(offload.shared_tier, unread, names)
    if offload.enabled:
        check_shared_tier(offload.shared_tier, names)
        try:
            check_node_tier(offload, SectionNames(names, "offload."))
        except ConfigError as error:
            raise SettingsError(str(error)) from error
    return settings


def contradictions(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    """Everything that is wrong.

    Args:
        engine: the settings.
        names: what other settings are called in the sentences.
    """
    yield from _ports(engine, names)
    yield from _pipeline(engine, names)
    yield from _data_parallel(engine, names)
    yield from _nodes(engine, names)
    yield from _kv_transfer(engine, names)
    yield from _lora(engine, names)
    yield from _cpu_tier(engine, names)
    yield from _tier_below(engine, names)


def _ports(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    """vLLM publishes the events of data parallel rank r at the port + r, and answers their replays at the replay port +
    r."""
    ranks, nodes = engine.data_parallel_size, engine.nodes_per_replica
    cores_here = ranks_of_pod(ranks, 1, nodes)[0]
    ports = {"port": range(engine.port, engine.port + 1)}
    if engine.kv_events.enabled:
        ports["kvEvents.port"] = range(engine.kv_events.port, engine.kv_events.port + ranks)
        ports["kvEvents.replayPort"] = range(engine.kv_events.replay_port, engine.kv_events.replay_port + ranks)
    of_ranks = names.given("dataParallelSize", ranks)
    for key, taken in ports.items():
        if taken[-1] > PORT_MAX:
            yield Contradiction(
                key,
                taken[0],
                f"with {of_ranks}, whose last rank would use {taken[-1]}",
                f"set it to {PORT_MAX - ranks + 1} or less",
            )
        for own in LEADER_PORTS if nodes > 1 else ():
            if own in taken[:cores_here]:
                given = names.given("nodesPerReplica", nodes)
                yield Contradiction(key, taken[0], f"takes {own}, where the pods of {given} meet", "choose another")
    for (key, taken), (other, others) in itertools.combinations(ports.items(), 2):
        if taken[0] == others[0]:
            yield Contradiction(other, others[0], f"is also {names.name(key)}", "give each its own port")
        elif taken[0] <= others[-1] and others[0] <= taken[-1]:
            yield Contradiction(
                key,
                taken[0],
                f"and {names.given(other, others[0])} are too near: rank r of {of_ranks} uses both ports of kvEvents "
                "+ r",
                f"keep them {ranks} or more apart, and other ports out of these",
            )


def _pipeline(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    stages = engine.pipeline_parallel_size
    if stages == 1:
        return
    pipeline, one = names.given("pipelineParallelSize", stages), names.given("pipelineParallelSize", 1)
    for key in _changes_of_steps(engine) if engine.offload.enabled else ():
        yield Contradiction(
            key,
            "on",
            f"changes one step at a time, but {pipeline} keeps several steps under way",
            f"set it to off, or {one}",
        )
    if LAYER_PARTITION_VARIABLE in engine.extra_env:
        yield Contradiction(
            "extraEnv",
            None,
            f"{LAYER_PARTITION_VARIABLE} gives stages other layers than memory is reckoned with",
            f"remove it: vLLM spreads the layers evenly over the stages of {pipeline}",
        )
    yield from _executor(engine, f"{pipeline} in one pod")


def _data_parallel(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    if engine.data_parallel_size == 1:
        return
    given, one = names.given("dataParallelSize", engine.data_parallel_size), names.given("dataParallelSize", 1)
    if engine.pipeline_parallel_size > 1:
        yield Contradiction(
            "pipelineParallelSize",
            engine.pipeline_parallel_size,
            f"and {given}: stages are not proven with data parallel ranks",
            f"set {names.given('pipelineParallelSize', 1)} or {one}",
        )
    for key in _changes_of_steps(engine) if engine.offload.enabled else ():
        yield Contradiction(
            key,
            "on",
            f"changes the steps of one rank, but the ranks of {given} step together if the model is a mixture of "
            "experts",
            f"set it to off, or {one}",
        )
    yield from _other_connector(engine, given, one)


def _nodes(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    nodes, cores = engine.nodes_per_replica, engine.data_parallel_size
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if nodes == 1:
        return
    given = names.given("nodesPerReplica", nodes)
    if cores > 1 and cores % nodes:
        yield Contradiction(
            "nodesPerReplica",
            nodes,
            f"does not divide {names.given('dataParallelSize', cores)}, of which every pod has an equal part",
            "make one a multiple of the other, so that no engine core spans pods",
        )
    if cores == 1 and ranks % nodes:
        yield Contradiction(
            "nodesPerReplica",
            nodes,
            f"does not divide {names.given('tensorParallelSize', engine.tensor_parallel_size)} x "
            f"{names.given('pipelineParallelSize', engine.pipeline_parallel_size)}, of whose {ranks} ranks every pod "
            "has an equal part",
            "correct one of them",
        )
    if cores == 1 and engine.offload.enabled:
        yield Contradiction(
            "offload.enabled",
            True,
            f", but {given} spreads one engine core over pods, and its scheduler, which reads and writes the CPU tier "
            "and the shared tier, sees those of its own pod alone",
            f"set it to false, or {names.name('dataParallelSize')} to a multiple of {nodes}",
        )
    yield from _other_connector(engine, given, names.given("nodesPerReplica", 1))
    yield from _executor(engine, f"{given}, for which vLLM needs mp")


def _kv_transfer(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    connector = _connector(engine)
    if connector in NOT_BESIDE:
        yield Contradiction(
            "kvTransfer.connector",
            connector,
            "is no second connector: Spillway's own is there with offload.enabled: true and combines the two itself",
            "name the other one, or remove kvTransfer",
        )
    for key in _changes_of_steps(engine) if connector else ():
        problem = f"is not proven beside {names.given('kvTransfer.connector', connector)}"
        yield Contradiction(key, "on", problem, 'set it to "off"')


def _lora(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    lora = engine.lora
    if lora.resolver_folder and not lora.runtime_updating:
        yield Contradiction(
            "lora.resolverFolder",
            None,
            "vLLM loads adapters by name only if they may change at run time",
            f"set {names.name('lora.runtimeUpdating')}: true",
        )
    if lora.max_in_memory is not None and lora.max_in_memory < lora.max_active:
        yield Contradiction(
            "lora.maxInMemory",
            lora.max_in_memory,
            f"is less than {names.given('lora.maxActive', lora.max_active)}, whose adapters are in memory too",
            "raise or remove it",
        )


def _cpu_tier(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    offload = engine.offload
    size_bytes = offload.cpu_bytes if isinstance(offload, Offload) else offload.cpu_bytes_to_use
    if not offload.enabled:
        return
    if offload.num_cpu_blocks is not None and size_bytes is not None:
        size_text = format_byte_count(parse_byte_count(size_bytes))
        problem = f"and {names.given('offload.cpuBytes', size_text)} both size the CPU tier"
        yield Contradiction("offload.numCpuBlocks", offload.num_cpu_blocks, problem, "set one of them to null")
    if offload.num_cpu_blocks is None and size_bytes is None:
        sizes = f"{names.name('offload.numCpuBlocks')} (or {names.name('offload.cpuBytes')})"
        remedy = f"set {sizes}, or {names.given('offload.enabled', False)}"
        yield Contradiction("offload.enabled", True, "needs the size of the CPU tier", remedy)


def _tier_below(engine: EngineSettings | Engine, names: SettingNames) -> Iterator[Contradiction]:
    above, below = engine.offload.shared_tier.type, engine.offload.shared_tier.below.type
    if below != "none" and above == "none":
        yield Contradiction(
            "offload.sharedTier.below.type",
            below,
            f", but {names.given('offload.sharedTier.type', above)}, and nothing is above it",
            f"set {names.given('offload.sharedTier.type', below)}, or name the nearer tier there",
        )
    elif below != "none" and below == above:
        yield Contradiction(
            "offload.sharedTier.below.type",
            below,
            "is the type of the tier above it, too",
            "set another type, or none: each type has one section of settings here",
        )


def _changes_of_steps(engine: EngineSettings | Engine) -> list[str]:
    """Settings that are on and change steps of the scheduler."""
    modes = {
        "offload.layerwiseLoads": engine.offload.layerwise_loads,
        "offload.computeWhileLoading": engine.offload.compute_while_loading,
        "offload.fairSteps": engine.offload.fair_steps,
    }
    return [key for key, mode in modes.items() if mode in ("on", True)]  # True: YAML's reading of a bare on


def _connector(engine: EngineSettings | Engine) -> str:
    return "" if engine.kv_transfer is None else engine.kv_transfer.connector


def _other_connector(engine: EngineSettings | Engine, given: str, one: str) -> Iterator[Contradiction]:
    if connector := _connector(engine):
        problem = f"{connector} is not proven with {given}"
        yield Contradiction("kvTransfer", None, problem, f"remove it, or set {one}")


def _executor(engine: EngineSettings | Engine, what: str) -> Iterator[Contradiction]:
    executor = argument_value(engine.extra_args, "--distributed-executor-backend")
    if executor not in (None, "mp"):
        problem = f"--distributed-executor-backend: {json.dumps(executor)} cannot run {what}"
        yield Contradiction("extraArgs", None, problem, "remove it, and vLLM takes mp")


def _check_text(settings: EngineSettings) -> None:
    text, names = settings.lifecycle.self_check_text, settings.names
    if text and not TEXT_CHARACTERS_MIN <= len(text) <= TEXT_CHARACTERS_MAX:
        raise SettingsError(
            f"{names.name('lifecycle.selfCheckText')} has {len(text)} characters; give {TEXT_CHARACTERS_MIN} to "
            f"{TEXT_CHARACTERS_MAX}: one or two sentences that the model predicts well"
        )


def _check_cpu_binding(settings: EngineSettings) -> None:
    if settings.cpu_binding is not None and argument_value(settings.extra_args, "--additional-config") is not None:
        names, is_on = settings.names, settings.cpu_binding == "on"
        raise SettingsError(
            f"{names.given('cpuBinding', settings.cpu_binding)} is given to vLLM as --additional-config, which "
            f"{names.name('extraArgs')} has too, and vLLM takes the last one; write "
            f'"enable_cpu_binding": {str(is_on).lower()} there, and remove {names.name("cpuBinding")}'
        )
