"""Names that two parts of Spillway must spell alike, because one writes them and the other reads them.

Gateway, engine service, connector and tools run as separate processes, of separate releases during an upgrade, so a
name here is a format: a change of it needs both sides. tests/repository/test_wire.py holds that no other module of the
product spells one of them.
"""

from __future__ import annotations

import re

# HTTP headers. The gateway adds those of its own to replies and drops them from requests.
OWN_HEADERS_PREFIX = "x-spillway-"
ENGINE_HEADER = "x-spillway-engine"
ROUTE_HEADER = "x-spillway-route"
PREFIX_TOKENS_HEADER = "x-spillway-prefix-tokens"
OVERHEAD_HEADER = "x-spillway-overhead-ms"
RANK_HEADER = "x-data-parallel-rank"  # vLLM's name: which of its engine cores gets a request

# Paths that gateway, engine service and simulator serve beside the OpenAI API.
CONFIG_PATH = "/spillway/config"
PROMOTE_PATH = "/spillway/promote"
WEIGHTS_PATH = "/spillway/weights"
# Methods that the connector adds to EngineCore, and that the engine service calls.
PROMOTE_UTILITY = "spillway_promote"
SETTLE_UTILITY = "spillway_settle"
WEIGHTS_UTILITY = "spillway_weights"

# The type of an error by which an engine says that it ends, and that no request is the reason.
ENDING_ERROR = "engine_ending"

# Members in which the gateway names a session in a request's kv_transfer_params, and the connector reads.
SESSION_MEMBER = "spillway_session"
SESSION_ID = "id"
SESSION_ENDED = "ended"
SESSION_RETURN_SECONDS = "return_seconds"
SESSION_RETURN_SECONDS_MAX = 7 * 86_400

# The member that says how long a prompt is retained: up to which token and for how many seconds, in pairs, and the
# share of each tier that the tenant may retain. No token: the whole prompt.
RETENTION_MEMBER = "spillway_retention"
RETENTION_MARKS = "marks"
RETENTION_SHARE = "share"
RETENTION_MARKS_MAX = 4
RETENTION_SECONDS_MAX = 7 * 86_400

# That another engine is to go on with the prompt (true): its chunks are announced once they can be loaded.
HAND_OVER_MEMBER = "spillway_hand_over"

# Types of shared tiers, the nearest medium first; of two that an engine loads from, its lookups find most in that one.
STORE_TYPES = ("nvme", "redis", "s3")
NODE_STORE = "node"  # in a store's medium: the CPU tier of a node, which its engines share

_STORE_MEDIUM = re.compile(r"[a-z][a-z0-9]{0,15}/[0-9a-f]{16}")


def store_medium(tier_type: str, store_id: bytes) -> str:
    """The medium of KV events about a tier that engines share.

    Args:
        tier_type: `nvme`, `redis`, `s3` or NODE_STORE.
        store_id: The eight bytes by which engines that share a store know it.
    """
    return f"{tier_type}/{store_id.hex()}"


def names_a_store(medium: str) -> bool:
    """Whether the medium of a KV event is a `store_medium`."""
    return _STORE_MEDIUM.fullmatch(medium) is not None


def type_of_store(medium: str) -> str:
    """The tier type in a `store_medium`."""
    return medium.partition("/")[0]


def names_a_node(medium: str) -> bool:
    """Whether a `store_medium` is that of a node's CPU tier."""
    return medium.startswith(f"{NODE_STORE}/")
