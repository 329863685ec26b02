"""Makes the shared tier that the scheduler drives from one configured entry: one tier, or one behind another."""

from __future__ import annotations

import threading
import time

from spillway_connector.config import NvmeTierConfig, TierConfig
from spillway_connector.engine.shared_tiers.open_tier import open_tier
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfer.announcements import Announcements
from spillway_connector.transfer.chain import TierChain
from spillway_connector.transfer.demotions import Demotions
from spillway_connector.transfer.shared_tier import SharedTier
from spillway_connector.transfer.stats import Operation


def open_shared_tier(
    config: TierConfig,
    namespace: Namespace,
    geometry: ChunkGeometry,
    rows: memoryview,
    *,
    announces_blocks: bool,
    before: SharedTier | TierChain | None = None,
) -> SharedTier | TierChain:
    """Open the tier, or the two behind each other.

    Args:
        config: The tier's settings.
        namespace: The namespace of the tier's chunks.
        geometry: The geometry of a row.
        rows: The CPU tier's rows.
        announces_blocks: Whether KV events about the tiers' contents are published.
        before: The tier with the same settings that this one replaces; it stays open until its owner closes it.

    Raises:
        ConfigError: The settings, or the store, cannot be used.
    """
    answered: ChangeLog[str] = ChangeLog() if before is None else before.answered_requests
    progress = threading.Event()
    places: list[SharedTier | None] = [None, None]
    if before is not None:
        places = [before, None] if isinstance(before, SharedTier) else list(before.members)

    def drive(tier: Tier, of: TierConfig, place: SharedTier | None) -> SharedTier:
        return SharedTier(
            tier,
            rows=rows,
            row_bytes=geometry.row_bytes,
            payload_bytes=geometry.payload_bytes,
            limits=of.limits,
            # A chunk that was asked for once is worth its room if a tier below takes the chunks that leave for it.
            admits_all=of.below is not None,
            room_bytes=(of.max_bytes or 0) if isinstance(of, NvmeTierConfig) else 0,
            announcements=Announcements(time.monotonic) if announces_blocks else None,
            answered_requests=answered,
            progress=progress,
            before=place,
        )

    above = open_tier(config, namespace, geometry.payload_bytes)
    if config.below is None:
        return drive(above, config, places[0])
    try:
        below = open_tier(config.below.tier, namespace, geometry.payload_bytes)
    except BaseException:
        above.close()
        raise
    driven, first = drive(below, config.below.tier, places[1]), drive(above, config, places[0])
    limits = config.below.tier.limits
    demotions = Demotions(
        above,
        below,
        idle_seconds=config.below.idle_seconds,
        threads=max(1, limits.io_threads // 2),
        lookup_seconds=limits.lookup_timeout_seconds,
        store_seconds=limits.store_timeout_seconds,
        breaker=driven.breaker_of(Operation.STORE),
        counters=(first.counters, driven.counters),
        clock=time.monotonic,
    )
    return TierChain(first, driven, demotions, clock=time.monotonic)
