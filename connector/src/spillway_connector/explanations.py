"""The meaning of each reason of a failed operation of a shared tier, and its remedy.

The reasons are those of errors.py, which metrics carry as a label. The messages of the object store's tier, `spillway
doctor` and docs/operations.md have their sentences from here. Settings are named as in `offload.sharedTier`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spillway_connector.errors import MISS, CorruptReason, RefusedReason, UnreachableReason


class Explanation(NamedTuple):
    """`remedy` is empty if the reason only follows from another one."""

    meaning: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.meaning}; {self.remedy}" if self.remedy else self.meaning


_DAMAGED = (
    "no answer used it; the disk, the store or another writer damages blocks, which `spillway tier verify "
    "--remove-damaged` lists and removes"
)
_OVERLOADED = "fewer engines for each server, a faster store or network, more ioThreads (redis.connections)"

# Keyed by reason, whatever the type of the tier.
GENERAL: Mapping[str, Explanation] = {
    CorruptReason.SHORT: Explanation("a block is shorter than it announces: its write was cut", _DAMAGED),
    CorruptReason.MAGIC: Explanation("no block lies under the name of one", _DAMAGED),
    CorruptReason.VERSION: Explanation(
        "a block has a format that this release cannot read", "finish the upgrade of the engines"
    ),
    CorruptReason.HEADER: Explanation("the header of a block is damaged", _DAMAGED),
    CorruptReason.KEY: Explanation("another block lies under the name of one", _DAMAGED),
    CorruptReason.LENGTH: Explanation("a block has another size than this engine's", _DAMAGED),
    CorruptReason.PAYLOAD: Explanation("the bytes of a block are damaged", _DAMAGED),
    CorruptReason.SEAL: Explanation(
        "a block was sealed with another key under the same id, or was forged",
        "give all engines one Secret (offload.encryption), and a new key a new id",
    ),
    RefusedReason.READ_ONLY: Explanation("the store takes no writes", "make it writable; its own log has the cause"),
    RefusedReason.NO_SPACE: Explanation(
        "the store has no room, and nothing in it that may be evicted", "make room, or give it more"
    ),
    RefusedReason.OUT_OF_MEMORY: Explanation(
        "the server has reached maxmemory and evicts nothing",
        "set maxmemory-policy to allkeys-lru, and look at what else uses its memory",
    ),
    RefusedReason.PERMISSION: Explanation("the engines lack a right", "give it to them; the engine's log names it"),
    RefusedReason.FOREIGN: Explanation(
        "a link, a special file or a file of another user has the name of one of the store's files",
        "the engine's log names it: remove it, and check who may write to the directory",
    ),
    RefusedReason.AUTHENTICATION: Explanation(
        "the store does not accept the login", "compare the Secret with the store's user"
    ),
    RefusedReason.CLOCK_SKEW: Explanation(
        "the clock of this node and the store's differ by too much for a signature", "set the clock (NTP, chrony)"
    ),
    RefusedReason.CREDENTIALS_EXPIRED: Explanation(
        "the credentials have expired",
        "those of a workload identity renew themselves; those of a Secret need a new one and engine.secretsRevision",
    ),
    RefusedReason.NO_CREDENTIALS: Explanation(
        "neither the environment, an identity nor the node's metadata service gave credentials",
        "name a Secret (s3.existingSecret), or annotate engine.serviceAccount and let engines reach STS",
    ),
    RefusedReason.WRONG_REGION: Explanation("the bucket is in another region", "correct s3.region"),
    RefusedReason.THROTTLED: Explanation(
        "the store asks for fewer requests a second, and did so again after each pause",
        "larger chunks (offload.blocksPerChunk), fewer s3.connections, or another s3.prefix",
    ),
    RefusedReason.LOADING: Explanation(
        "the server reads its data set, runs a script, or waits for its primary", "wait; its log says how far it is"
    ),
    RefusedReason.MOVED: Explanation(
        "the key is on another node of the cluster, or none serves its slot",
        "write redis.url as redis-cluster://HOST:PORT, and look at `CLUSTER INFO`",
    ),
    RefusedReason.RESOURCES: Explanation(
        "the engine's process has no file descriptor, memory or index entry left",
        "raise the limit that the engine's log names",
    ),
    RefusedReason.PROTOCOL: Explanation(
        "what answers at the address is no Redis, or a proxy changes its replies",
        "correct redis.url (redis:// is without TLS, rediss:// with it)",
    ),
    RefusedReason.NAMESPACE: Explanation(
        "an engine of other settings has stored something under this engine's names",
        "harmless if it ends; if not, delete what the engine's log names",
    ),
    RefusedReason.QUEUE_FULL: Explanation(
        "more bytes were to be moved than the queue holds", "raise storeQueueBytesMax or loadQueueBytesMax"
    ),
    RefusedReason.QUEUE_AGE: Explanation(
        "no thread, or no request of s3.putsPerSecondMax and s3.getsPerSecondMax, was free in time",
        "more ioThreads, or a higher bound of requests",
    ),
    RefusedReason.BEHIND: Explanation("computing was faster than a load under way", ""),
    RefusedReason.BREAKER_OPEN: Explanation("the tier rests after repeated failures", ""),
    RefusedReason.CLOSED: Explanation("the engine was ending, or its weights were changed", ""),
    RefusedReason.OTHER: Explanation("the store refused for a reason of its own", "the engine's log has its words"),
    UnreachableReason.CONNECT: Explanation(
        "nothing accepts a connection at the address",
        "start the store, or correct the address, its DNS name or the NetworkPolicy (networkPolicy.engineEgress)",
    ),
    UnreachableReason.DISCONNECTED: Explanation(
        "a connection ended within a reply", "look at the store's log, and at proxies and firewalls before it"
    ),
    UnreachableReason.INPUT_OUTPUT: Explanation(
        "the disk or the mount is sick", "look at the node's dmesg; mount the volume again, or replace the disk"
    ),
    UnreachableReason.ROOT_MISSING: Explanation("the directory is not there", "mount the volume, or correct nvme.path"),
    UnreachableReason.BUCKET_MISSING: Explanation("there is no such bucket", "make it, or correct s3.bucket"),
    UnreachableReason.TLS: Explanation(
        "the two ends agree on no TLS connection",
        "correct the authority of the certificate (caSecret), the host's name in it, or the scheme of the address",
    ),
    UnreachableReason.TIMEOUT: Explanation(
        "no answer came within the deadline",
        f"{_OVERLOADED}; if its latency is high, a higher lookupTimeoutSeconds, loadTimeoutSeconds or "
        "storeTimeoutSeconds",
    ),
    MISS: Explanation(
        "a block that a lookup found was gone at its load: it was evicted or has expired",
        "a larger tier, or a longer lifetime of its blocks, if it is frequent",
    ),
}

# Keyed by type of the tier and reason, if one type has more to say.
OF_TYPE: Mapping[tuple[str, str], Explanation] = {
    ("nvme", RefusedReason.READ_ONLY): Explanation(
        "the file system is read-only", "look at the node's dmesg: a failing disk is often remounted so"
    ),
    ("nvme", RefusedReason.NO_SPACE): Explanation(
        "the file system is full of other data, a quota is below nvme.maxBytes, or less is free than the tier leaves",
        "`df` on the node and `spillway tier status` show which; make room, or lower nvme.maxBytes",
    ),
    ("nvme", RefusedReason.PERMISSION): Explanation(
        "the engines' user may not read or write the directory", "give the directory to that user (runAsUser, fsGroup)"
    ),
    ("redis", RefusedReason.READ_ONLY): Explanation(
        "the server is a replica, lacks replicas, or cannot save",
        "let redis.url name the primary or the sentinels; the server's log has the rest",
    ),
    ("redis", RefusedReason.PERMISSION): Explanation(
        "the login's ACL lacks a command or the keys", "give it what the engine's log names"
    ),
    ("s3", CorruptReason.SHORT): Explanation("the store holds or gave half an object", _DAMAGED),
    ("s3", RefusedReason.NO_SPACE): Explanation(
        "the bucket's quota or the store's room is used up", "raise it, or shorten the lifecycle rule"
    ),
    ("s3", RefusedReason.PERMISSION): Explanation(
        "the credentials lack a right",
        "the tier needs s3:GetObject, s3:PutObject and s3:DeleteObject on the prefix, and s3:ListBucket on the bucket, "
        "without which a missing object is answered like a forbidden one",
    ),
    ("s3", RefusedReason.AUTHENTICATION): Explanation(
        "the store does not accept these credentials",
        "compare them with the store's (s3.existingSecret, or the role of engine.serviceAccount)",
    ),
    ("s3", UnreachableReason.DISCONNECTED): Explanation(
        "replies end halfway, so that half an object came", "look at proxies before the store, and at its log"
    ),
    ("s3", MISS): Explanation(
        "an object that a lookup found was gone at its load: a lifecycle rule or a purge removed it, or a replica of "
        "the store does not have it yet",
        "a longer lifecycle rule, or one site of the store for all engines, if it is frequent",
    ),
}

# Why a chunk that was wanted did not come (transfer/stats.py, MissReason).
MISSES: Mapping[str, str] = {
    "absent": "the tier does not hold it: evicted, expired or never stored",
    "lookup_deadline": "the tier did not say in time whether it holds it",
    "refused": "not asked: a breaker is open, or too many lookups are",
    "weights_changed": "the model's weights were changed in place",
    "gone": "there at the lookup and not at the load",
    "corrupt": "damaged",
    "load_deadline": "it did not come in time",
    "load_failed": "the load failed",
    "shed": "more was to be loaded at once than the tier can give in time",
    "not_worth": "computing it is faster",
    "no_room": "the CPU tier had no row for it",
    "request_deadline": "its request had waited enough",
}


def explanation(reason: str, tier_type: str) -> Explanation | None:
    """Return what a reason means for a tier of this type (nvme, redis, s3); None: the reason is of another release."""
    return OF_TYPE.get((tier_type, reason)) or GENERAL.get(reason)
