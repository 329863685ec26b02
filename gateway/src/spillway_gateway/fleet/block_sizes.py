"""The block sizes that the engines of one model use: each prompt is hashed once for each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from spillway_gateway.fleet.block_table import BITS_PER_ENGINE
from spillway_gateway.fleet.engine_blocks import EngineBlocks

logger = logging.getLogger(__name__)

ATTESTED_BLOCKS = 16  # of one size, after which a few blocks of another one do not displace it
SIZES_MATCHED_MAX = 4  # block sizes for which each prompt is hashed; a rolling change of blockSize makes two


class BlockSizes:
    """engines: the index's engines by name; `engines_changed` is called after each change. default: tokens per block
    until an event names a size."""

    def __init__(self, model: str, default: int, engines: Mapping[str, EngineBlocks]) -> None:
        self._model = model
        self._default = default
        self._engines = engines
        self._sizes: tuple[int, ...] = ()
        self._devices_of_size: dict[int, int] = {}  # block size -> device bits; emptied when engines or sizes change

    @property
    def in_use(self) -> tuple[int, ...]:
        """Every size in use, that of most engines first; more than one while engines are configured differently."""
        return self._sizes or (self._default,)

    def accept(self, engine: EngineBlocks, block_tokens: int, blocks: int) -> bool:
        """Return False for blocks of another size than the engine's own, such as the partial blocks that newer engines
        announce. blocks: of that size, in one event.

        A partial block may be the first to arrive, so a larger size displaces a smaller one, once as many blocks of it
        have come in a row, ATTESTED_BLOCKS at most. So a single block of a wrong size costs an engine nothing. A
        smaller size displaces one that is not attested. Keys of different sizes never meet, so engines of several sizes
        share one index; blocks that an engine stored under another size stay until it removes them.
        """
        if block_tokens == engine.block_tokens:
            engine.blocks_of_size += blocks
            engine.other_size = None
            return True
        if engine.block_tokens is not None:
            size, before = engine.other_size or (block_tokens, 0)
            seen = blocks + (before if size == block_tokens else 0)
            engine.other_size = block_tokens, seen
            attested = engine.blocks_of_size >= ATTESTED_BLOCKS
            if seen < min(engine.blocks_of_size, ATTESTED_BLOCKS):
                return False
            if block_tokens < engine.block_tokens and (attested or seen < ATTESTED_BLOCKS):
                return False
        engine.block_tokens, engine.blocks_of_size, engine.other_size = block_tokens, blocks, None
        self.engines_changed()
        return True

    def engines_changed(self) -> None:
        """An engine was added or removed, or has another block size."""
        self._devices_of_size = {}
        counts = Counter(each.block_tokens for each in self._engines.values() if each.block_tokens is not None)
        # That of most engines first; of equally many the larger.
        sizes = tuple(sorted(counts, key=lambda size: (counts[size], size), reverse=True))
        if sizes == self._sizes:
            return
        if len(sizes) > 1:
            engines = self._engines.items()
            users = [
                f"{size} tokens: {', '.join(name for name, engine in engines if engine.block_tokens == size)}"
                for size in sizes
            ]
            ignored = f"; only the first {SIZES_MATCHED_MAX} are matched" if len(sizes) > SIZES_MATCHED_MAX else ""
            logger.warning(
                "model %s: its engines use different block sizes (%s)%s", self._model, "; ".join(users), ignored
            )
        self._sizes = sizes[:SIZES_MATCHED_MAX]

    def devices(self, block_tokens: int) -> int:
        """Device bits of the engines that can hold blocks of this size; those of unknown size included."""
        devices = self._devices_of_size.get(block_tokens)
        if devices is None:
            devices = 0
            for engine in self._engines.values():
                if engine.block_tokens in (None, block_tokens):
                    devices |= 1 << (engine.slot * BITS_PER_ENGINE)
            self._devices_of_size[block_tokens] = devices
        return devices
