"""Every error the connector raises on purpose, and what its catcher does about it.

    SpillwayError
    |-- ConfigError              a setting is wrong: the message names it and the remedy
    |   `-- WeightsUnknown       what a model was loaded from is unknown -> nothing is shared
    |-- UnsupportedEngine        this vLLM is not one the connector can serve in
    |-- HostMemoryError          the CPU tier's memory cannot be had
    |-- PlanError                block ids and rows do not fit together     -> the copy is refused, recompute
    |-- DeviceCopyError          the transport refused or lost a copy       -> recompute
    `-- TierError                one operation of a shared tier did not deliver
        |-- TierMiss             the entry is not there              -> recompute, nothing is wrong
        |-- TierCorrupt          the entry is there but not whole    -> recompute, remove the entry
        |-- TierRefused          the store answered "no"             -> recompute, rest this operation
        `-- TierUnreachable      the store did not answer            -> recompute, rest the tier
            `-- TierTimeout      ... within the deadline             -> the same; a late answer is void

Each tier error carries ``reason``, a word of a closed set that becomes a metric label; its sentence is for people.
explanations.py says what each reason means.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

MISS = "miss"  # the reason of a TierMiss
_Error = TypeVar("_Error", bound=BaseException)


def without_frames(error: _Error) -> _Error:
    """The same error and its causes without tracebacks, for an error that is stored after it was caught.

    A traceback references the frames the error passed through, and these their locals: buffers, files of a pool that
    has been replaced since. The frame that stores the error is one of them: a reference cycle, which only garbage
    collection frees, and an engine rarely collects the oldest generation.
    """
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        chain += one.__cause__, one.__context__
    return error


class SpillwayError(Exception):
    """Base of all errors raised by Spillway."""


class ConfigError(SpillwayError):
    """A setting cannot work. The message names the setting, the given value, what is needed and the remedy."""


class WeightsUnknown(ConfigError):
    """The model's weights cannot be distinguished from others, so its KV must not be shared."""


class UnsupportedEngine(SpillwayError):
    """The vLLM in this process lacks, or has redefined, something the connector relies on."""


class HostMemoryError(SpillwayError):
    """The CPU tier's memory cannot be allocated; the message gives the bytes needed and available."""


class PlanError(SpillwayError):
    """Block ids, group sizes and rows of a copy do not fit together: a bug, but never one that ends the engine."""


class DeviceCopyError(SpillwayError):
    """A copy between device and host was refused or failed; its destination must not be trusted."""


class CorruptReason(StrEnum):
    """Reasons for which a frame is not the requested one."""

    SHORT = "short"  # fewer bytes than a header, or than the header announces
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"  # the header's own checksum, or a field outside its range
    NAMESPACE = "namespace"
    KEY = "key"
    LENGTH = "length"  # an intact frame of another payload size
    PAYLOAD = "payload"  # the payload's checksum
    SEAL = "seal"  # encrypted with another key, or changed by someone without it
    FOREIGN = "foreign"  # a link, a FIFO, a device or a directory has the name of the frame's file


class RefusedReason(StrEnum):
    """Reasons for which a store that answered did not do the work."""

    READ_ONLY = "read_only"  # EROFS, READONLY
    NO_SPACE = "no_space"  # ENOSPC, EDQUOT, EFBIG, or no room within max_bytes
    OUT_OF_MEMORY = "out_of_memory"  # Redis maxmemory
    PERMISSION = "permission"  # EACCES, EPERM, NOPERM
    FOREIGN = "foreign"  # what has the name of one of the store's files is a link, or someone else's
    AUTHENTICATION = "authentication"  # NOAUTH, WRONGPASS, SignatureDoesNotMatch
    CLOCK_SKEW = "clock_skew"  # RequestTimeTooSkewed
    CREDENTIALS_EXPIRED = "credentials_expired"  # ExpiredToken
    NO_CREDENTIALS = "no_credentials"  # neither given nor found
    WRONG_REGION = "wrong_region"  # PermanentRedirect
    THROTTLED = "throttled"  # 503 SlowDown, 429: the store asks for fewer requests
    LOADING = "loading"  # the server reads its data set, or a replica waits for its primary
    MOVED = "moved"  # the key lives on another node
    RESOURCES = "resources"  # EMFILE, ENFILE, ENOMEM of this process
    PROTOCOL = "protocol"  # the peer does not speak RESP, or answered out of turn
    NAMESPACE = "namespace"  # another document is stored under our namespace
    QUEUE_FULL = "queue_full"  # this process has too many bytes under way
    QUEUE_AGE = "queue_age"  # waited too long in this process
    BEHIND = "behind"  # so little of it had arrived that computing it would have been faster
    BREAKER_OPEN = "breaker_open"
    CLOSED = "closed"
    OTHER = "other"  # any other answer of the store; or the tier's code failed


class UnreachableReason(StrEnum):
    """Reasons for which a store gave no answer."""

    CONNECT = "connect"
    DISCONNECTED = "disconnected"
    INPUT_OUTPUT = "input_output"  # EIO, ESTALE, ENXIO: the device or mount is sick
    ROOT_MISSING = "root_missing"  # the directory
    BUCKET_MISSING = "bucket_missing"
    TLS = "tls"
    TIMEOUT = "timeout"


class TierError(SpillwayError):
    """One operation of a shared tier did not deliver; the caller recomputes."""

    reason: str

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TierMiss(TierError):
    """The tier answered that it holds no such entry."""

    def __init__(self, message: str = "no such entry") -> None:
        super().__init__(MISS, message)


class TierCorrupt(TierError):
    """The tier holds an entry that is torn, damaged, foreign or mis-addressed; its bytes were not served."""

    def __init__(self, reason: CorruptReason, message: str) -> None:
        super().__init__(reason, message)


class TierRefused(TierError):
    """The store (or this process on its behalf) answered that it will not do the work now."""

    def __init__(self, reason: RefusedReason, message: str) -> None:
        super().__init__(reason, message)


class TierPartlyAsked(TierRefused):
    """A lookup of which some keys could not be asked for in time. found: as a whole answer, absent for those keys."""

    def __init__(self, found: list[bool], message: str) -> None:
        super().__init__(RefusedReason.QUEUE_AGE, message)
        self.found = found


class TierUnreachable(TierError):
    """The store gave no answer; whether a write took place is unknown."""

    def __init__(self, reason: UnreachableReason, message: str) -> None:
        super().__init__(reason, message)


class TierTimeout(TierUnreachable):
    """The deadline passed first. Whatever arrives later must not be used."""

    def __init__(self, message: str) -> None:
        super().__init__(UnreachableReason.TIMEOUT, message)
