"""The data parallel ranks of an engine, as the engines that routing chooses among.

vLLM with `--data-parallel-size N` and its internal load balancer is one HTTP server in front of N engine cores, each
with a KV cache, a prefix cache and a queue of its own. Rank r publishes KV events at the engine's port + r (vLLM's
`ZmqEventPublisher.offset_endpoint_port`), shows its metrics under engine="r", and is chosen by the header
`X-Data-Parallel-Rank: r`. If the cores are spread over several pods, the server is the first pod's, and each pod
publishes the events of its own ranks.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from spillway_gateway.config.settings import EngineConfig, rank_name


class RankConfig(EngineConfig, frozen=True):
    """One rank of an engine: its own name and event addresses, the engine's URL. process: the engine's name."""

    process: str = ""
    rank: int = 0

    @property
    def siblings(self) -> frozenset[str]:
        """The names of all ranks of the engine, this one included."""
        return frozenset(rank_name(self.process, rank) for rank in range(self.data_parallel_ranks))


def ranks_of(engine: EngineConfig) -> tuple[EngineConfig, ...]:
    """Return the targets that routing has for one engine: the engine itself, or each of its ranks. Pure."""
    if engine.data_parallel_ranks == 1:
        return (engine,)
    return tuple(
        RankConfig(
            rank_name(engine.name, rank),
            engine.url,
            _address(engine, engine.kv_events, rank),
            _address(engine, engine.kv_replay, rank),
            engine.data_parallel_ranks,
            engine.role,
            process=engine.name,
            rank=rank,
        )
        for rank in range(engine.data_parallel_ranks)
    )


def _address(engine: EngineConfig, first: str | None, rank: int) -> str | None:
    """tcp://HOST:PORT of rank 0 -> that of the rank: PORT + rank, on the pod that has it."""
    if first is None:
        return None
    port = urlsplit(first).port
    assert port is not None  # the configuration's check
    pod = rank * (1 + len(engine.workers)) // engine.data_parallel_ranks
    host = f"tcp://{engine.workers[pod - 1]}" if pod else first.removesuffix(f":{port}")
    return f"{host}:{port + rank}"
