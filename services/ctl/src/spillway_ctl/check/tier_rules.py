"""Rules of the shared tier: its bounds, its volume, its Redis or bucket, and its key. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from spillway_ctl.check.finding import Finding, bytes_text, number, quantity, quoted, shown_url, size
from spillway_ctl.check.group import Group, Release, user_of
from spillway_ctl.check.pod_memory import nvme_max_bytes
from spillway_ctl.check.shared_rules import closed_way, is_own_pod, login, many_databases, system_folder
from spillway_engine.tier_settings import plain_secrets
from spillway_settings.values.offload import BUCKET_ENDPOINT_PATTERN, BUCKET_PATTERN, BUCKET_PREFIX_PATTERN, tier_types

_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?"
_HOSTS = f"{_HOST}(,{_HOST})*"
_REDIS_URL = re.compile(
    rf"(rediss?://{_HOST}(/[0-9]*)?|rediss?-sentinel://{_HOSTS}/[^/?#,]+(\?db=[0-9]+)?"
    rf"|rediss?-cluster://{_HOSTS}(/0?)?|unix:///[^?#]+(\?db=[0-9]+)?)"
)
_FAR_SECONDS = 0.05  # a round trip to a store that is not near, its own time included
_CONNECTION_BYTES_PER_SECOND = 80 << 20  # of one connection: an assumption, not measured
_OPENING_ROUND_TRIPS = 3  # TCP, TLS and the request of a connection that is new
_KEY_ITSELF = re.compile(r"([0-9a-fA-F]{32}|[0-9a-fA-F]{48}|[0-9a-fA-F]{64})")
_PUBLIC_NAME = re.compile(r"[A-Za-z0-9._-]*")


def tier_findings(group: Group, release: Release) -> Iterator[Finding]:
    offload, tier = group.engine.offload, group.engine.offload.shared_tier
    at = f"{group.path}.offload.sharedTier"
    if "@" in tier.redis.url:
        yield Finding(
            f"{at}.redis.url", "holds credentials", "put them into a Secret and name it in redis.existingSecret"
        )
    if "@" in tier.s3.endpoint:
        yield Finding(
            f"{at}.s3.endpoint", "holds credentials", "put them into a Secret and name it in s3.existingSecret"
        )
    yield from _extra_tiers(group)
    yield from _key_id(group, at)
    if tier.type != "none" and not offload.enabled:
        yield Finding(
            f"{at}.type",
            f"{tier.type}, but offload.enabled is false, and a shared tier is filled from the CPU tier",
            "enable offload or set type: none",
        )
    elif tier.type != "none":
        yield from _encryption(group, at)
        types = tier_types(tier)
        if "nvme" in types:
            yield from _nvme(group, at)
        if "redis" in types:
            yield from _redis(group, release, at)
        if "s3" in types:
            yield from _s3(group, release, at)
        yield from _secret_files(group, at)
    elif tier.encryption.enabled:
        yield Finding(
            f"{at}.encryption.enabled",
            "true, but sharedTier.type is none, and it seals a shared tier",
            "set type: nvme, redis or s3, or encryption.enabled: false",
        )


def _extra_tiers(group: Group) -> Iterator[Finding]:
    for index, extra in enumerate(group.engine.offload.extra_tiers):
        at = f"{group.path}.offload.extraTiers[{index}]"
        for key in plain_secrets(extra):
            yield Finding(
                f"{at}.{key}",
                "would lie in a ConfigMap in plain text",
                "give that tier its secret by a variable (extraEnvVars) or a file (extraVolumes)",
            )
        kind = extra.get("type")
        if kind in ("spillway-nvme", "spillway-redis"):
            yield Finding(
                f"{at}.type",
                f"{kind} given, which is Spillway's own",
                f"set offload.sharedTier.type: {kind.removeprefix('spillway-')} in its place",
            )
        if not kind:
            yield Finding(f"{at}.type", "nothing given, vLLM's name of a tier needed", "add it, e.g. type: fs")


def _key_id(group: Group, at: str) -> Iterator[Finding]:
    encryption = group.engine.offload.shared_tier.encryption
    key_id = encryption.key_id
    is_key = _KEY_ITSELF.fullmatch(key_id) is not None
    is_public = not is_key and _PUBLIC_NAME.fullmatch(key_id) is not None
    if is_key:
        yield Finding(
            f"{at}.encryption.keyId",
            f"{len(key_id)} hexadecimal digits given, which look like the key itself and would lie in a ConfigMap",
            'make another key, keep it in the Secret alone, and give it a public name such as "2026-11"',
        )
    elif not is_public:
        yield Finding(
            f"{at}.encryption.keyId",
            f"text of {len(key_id)} characters given, the public name of the key (at most 64 letters, digits, dots, "
            "dashes and underscores, never the key itself) needed",
            "correct it",
        )
    # A key that is named but not used would store blocks in the clear although the operator expects them sealed.
    if not encryption.enabled and (key_id or encryption.key_secret_name):
        given = f"keyId: {key_id if is_public else '***'}" if key_id else f"keySecretName: {encryption.key_secret_name}"
        yield Finding(
            f"{at}.encryption",
            f"{given} is given, but enabled is false, so blocks would be stored unsealed",
            "set encryption.enabled: true, or remove keyId and keySecretName",
        )


def _encryption(group: Group, at: str) -> Iterator[Finding]:
    encryption = group.engine.offload.shared_tier.encryption
    if encryption.enabled and not encryption.key_id:
        yield Finding(
            f"{at}.encryption.keyId",
            "is empty",
            "give the key a public name, e.g. the date it was made: another key under another name begins with an "
            "empty "
            "tier",
        )
    if encryption.enabled and not encryption.key_secret_name:
        yield Finding(
            f"{at}.encryption.keySecretName",
            "is empty, and encryption.enabled: true needs a Secret with the key",
            "kubectl create secret generic kv-key "
            f"--from-literal={encryption.key_secret_key}=$(openssl rand -hex 32), and name it here",
        )


def _secret_files(group: Group, at: str) -> Iterator[Finding]:
    """Files from Secrets are root's and, with fsGroup, the group's."""
    pod = group.device.pod_security_context
    user = user_of(pod, group.device.security_context)
    if group.secret_files and user != 0 and pod.get("fsGroup") is None:
        yield Finding(
            at,
            f"user {user} of the engine cannot read the files of Secret {group.secret_files[0]}, which are root's "
            "alone",
            f"add fsGroup to {group.path}.podSecurityContext",
        )


def _nvme(group: Group, at: str) -> Iterator[Finding]:
    nvme, at = group.engine.offload.shared_tier.nvme, f"{at}.nvme"
    volume, most = nvme.volume, nvme_max_bytes(group.engine)
    if volume.type == "hostPath" and not volume.host_path:
        yield Finding(
            f"{at}.volume.hostPath",
            "is empty, and type: hostPath needs a folder of the node",
            "set it, such as to /var/lib/spillway/kv",
        )
    elif volume.type == "hostPath":
        yield from system_folder(
            f"{at}.volume.hostPath",
            volume.host_path,
            "mount the disk's file system somewhere else, and name a folder there, such as /mnt/nvme/spillway",
        )
    if volume.type == "existingClaim" and not volume.claim_name:
        yield Finding(f"{at}.volume.claimName", "is empty, and type: existingClaim needs it", "set it")
    given, room = size(nvme.max_bytes or 0), size(volume.size)
    if volume.type in ("emptyDir", "perPodClaim", "sharedClaim") and given > room:
        yield Finding(
            f"{at}.maxBytes",
            f"{bytes_text(given)} does not fit into the volume of {bytes_text(room)}",
            f"set maxBytes <= {number(volume.size)}, null for nine tenths of it, or enlarge volume.size",
        )
    if most and nvme.tenant_max_bytes is not None and size(nvme.tenant_max_bytes) > most:
        yield Finding(
            f"{at}.tenantMaxBytes",
            f"{bytes_text(size(nvme.tenant_max_bytes))} for one tenant is more than maxBytes: {bytes_text(most)} for "
            "all",
            f"set it to {most} or less",
        )
    if most and nvme.max_bytes is None and most < group.memory.row:
        row = group.memory.row
        yield Finding(
            f"{at}.volume.size",
            f"{number(volume.size)} given, nine tenths of which hold no chunk of {bytes_text(row)}",
            f"set it to {(row * 10 + 8) // 9} or more (with a unit, such as 500GiB), or lower offload.blocksPerChunk",
        )
    # The index of slabs is a file that all engines map into memory and lock: one kernel has to see them all.
    if nvme.mode == "slab" and volume.type == "sharedClaim":
        yield Finding(
            f"{at}.mode",
            "slab needs a disk of one node, but volume.type: sharedClaim is a ReadWriteMany claim that several nodes "
            "mount",
            "set mode: files, or volume.type: hostPath or perPodClaim",
        )
    if nvme.mode == "slab" and volume.type == "existingClaim" and group.pods > 1:
        yield Finding(
            f"{at}.mode",
            f"slab needs a disk of one node, but up to {group.pods} pods on any nodes mount claim {volume.claim_name}",
            "set mode: files (or auto, which looks at the file system), or volume.type: hostPath or perPodClaim",
        )


def _redis(group: Group, release: Release, at: str) -> Iterator[Finding]:
    redis, embedded, at = group.engine.offload.shared_tier.redis, release.values.redis, f"{at}.redis"
    url = redis.url
    if not url and not embedded.enabled:
        yield Finding(
            f"{at}.url",
            "is empty",
            "give one (redis://host:6379/0), or redis.enabled: true for the embedded trial server",
        )
    elif url and "@" not in url and _REDIS_URL.fullmatch(url) is None:
        yield Finding(
            f"{at}.url",
            f"{quoted(shown_url(url))} is no address",
            "write redis://host:6379/0, redis-sentinel://host:26379,host:26379/service?db=0, "
            "redis-cluster://host:6379,host:6379 (rediss for TLS) or unix:///path?db=0",
        )
    is_alone = not group.engine.sidecars and not group.engine.init_containers and not group.engine.host_network
    if is_alone and is_own_pod(url):
        yield Finding(
            f"{at}.url",
            f"{shown_url(url)} is the engine's own pod, in which nothing else runs",
            "write the name of Redis's Service, such as redis://redis.cache.svc:6379/0",
        )
    if url.startswith("unix:") and not group.engine.extra_volume_mounts:
        yield Finding(
            f"{at}.url",
            f"{shown_url(url)} is a socket in the pod, but nothing brings it",
            "mount its folder with extraVolumes and extraVolumeMounts",
        )
    for port in re.findall(r":([0-9]{1,5})(?:[,/]|$)", re.sub(r"\[[^]]*\]", "", url)):
        if not 1 <= int(port) <= 65535:
            yield Finding(
                f"{at}.url",
                f"port {port} given, 1 to 65535 needed",
                "correct it (Redis has 6379, Sentinel 26379)",
            )
    yield from many_databases(f"{at}.url", url)
    if service := re.fullmatch(r"(rediss?-sentinel://.*)/([0-9]+)", url):
        yield Finding(
            f"{at}.url",
            f"{service[2]} is the name of the service that Sentinel watches here, not a database",
            f"write {shown_url(service[1])}/SERVICE?db={service[2]}, unless it has that name",
            is_note=True,
        )
    if (redis.tls.ca_secret.name or redis.tls.client_secret.name) and not group.redis_url.startswith("rediss"):
        yield Finding(
            f"{at}.tls",
            f"it names Secrets, but url: {shown_url(group.redis_url)} asks for no TLS",
            "write rediss://..., or remove them",
        )
    yield from login(f"{at}.existingSecret", redis.existing_secret)
    if redis.payload_connections > redis.connections:
        yield Finding(
            f"{at}.payloadConnections",
            f"{redis.payload_connections} is more than connections: {redis.connections}",
            "raise connections or lower payloadConnections",
        )
    if not url and embedded.enabled:
        yield from _embedded_redis(group, release, at)
    if url and not url.startswith("unix:"):
        yield from closed_way(release.values.network_policy, "engineEgress", f"{at}.url: {shown_url(url)}")


def _s3(group: Group, release: Release, at: str) -> Iterator[Finding]:
    s3, at = group.engine.offload.shared_tier.s3, f"{at}.s3"
    if re.fullmatch(BUCKET_PATTERN, s3.bucket) is None:
        yield Finding(
            f"{at}.bucket",
            f"{quoted(s3.bucket)} given, the name of a bucket (3 to 63 lower-case letters, digits, dots and dashes) "
            "needed"
            if s3.bucket
            else "is empty",
            "name one that is there, such as spillway-kv",
        )
    if re.fullmatch(BUCKET_PREFIX_PATTERN, s3.prefix) is None:
        yield Finding(
            f"{at}.prefix",
            f"{quoted(s3.prefix)} given, parts of letters, digits, dots, dashes and underscores with a slash behind "
            "each needed",
            "write it like kv/ or teams/chat/",
        )
    endpoint = s3.endpoint
    if endpoint and "@" not in endpoint and re.fullmatch(BUCKET_ENDPOINT_PATTERN, endpoint) is None:
        yield Finding(
            f"{at}.endpoint",
            f"{quoted(shown_url(endpoint))} is no address",
            "write https://host:port without a path (http:// has no TLS), or nothing for AWS",
        )
    if endpoint and is_own_pod(endpoint) and not group.engine.sidecars and not group.engine.host_network:
        yield Finding(
            f"{at}.endpoint",
            f"{shown_url(endpoint)} is the engine's own pod, in which nothing else runs",
            "write the name of the store's Service, such as https://minio.storage.svc:9000",
        )
    if s3.ca_secret.name and endpoint.startswith("http:"):
        yield Finding(
            f"{at}.caSecret",
            f"it names a Secret, but endpoint: {shown_url(endpoint)} asks for no TLS",
            "write https://..., or remove it",
        )
    if not s3.path_style and re.match(r"https?://(\[|[0-9.]+(:|/|$))", endpoint):
        yield Finding(
            f"{at}.pathStyle",
            f"false puts the bucket's name in front of {shown_url(endpoint)}, which is no name",
            "set pathStyle: true, or give the endpoint a name",
        )
    if not s3.existing_secret.name and not _has_identity(group):
        yield Finding(
            f"{at}.existingSecret.name",
            "is empty, and no annotation of engine.serviceAccount names an identity, so the engines' rights are those "
            "of the node",
            "name a Secret with the two keys, or annotate the service account",
            is_note=True,
        )
    to = f"{at}.endpoint: {shown_url(endpoint) if endpoint else 'AWS'}"
    yield from closed_way(release.values.network_policy, "engineEgress", to)
    yield from _far_lookups(group, at)
    yield from _far_loads(group, at)


def _far_lookups(group: Group, at: str) -> Iterator[Finding]:
    """A lookup is one request for each chunk, some at once; if it never ends in time, nothing is ever found."""
    engine, tier = group.engine, group.engine.offload.shared_tier
    chunks = math.ceil(engine.model.max_length / (engine.block_size * engine.offload.blocks_per_chunk))
    rounds = math.ceil(chunks / tier.s3.connections) - 1 + _OPENING_ROUND_TRIPS
    needed = round(rounds * _FAR_SECONDS, 2)
    limits, own = (tier, "") if tier.type == "s3" else (tier.below, "below.")
    timeout = limits.lookup_timeout_seconds
    if timeout < needed:
        yield Finding(
            f"{at.removesuffix('s3')}{own}lookupTimeoutSeconds",
            f"{number(timeout)} given, but a lookup of the longest prompt is {chunks} requests, "
            f"{tier.s3.connections} at once, and takes {number(needed)} s at a round trip of "
            f"{number(_FAR_SECONDS * 1000)} ms: too late, it finds nothing",
            f"set it to {number(needed)} or more unless the store is nearer, or raise blocksPerChunk or s3.connections",
            is_note=True,
        )


def _far_loads(group: Group, at: str) -> Iterator[Finding]:
    """Each thread loads one chunk after the other; what comes late is computed."""
    engine, tier, row = group.engine, group.engine.offload.shared_tier, group.memory.row
    limits, own = (tier, "") if tier.type == "s3" else (tier.below, "below.")
    chunks = math.ceil(engine.model.max_length / (engine.block_size * engine.offload.blocks_per_chunk))
    at_once = min(limits.io_threads, tier.s3.connections)
    needed = round(math.ceil(chunks / at_once) * (_FAR_SECONDS + row / _CONNECTION_BYTES_PER_SECOND), 1)
    timeout = limits.load_timeout_seconds
    if timeout < needed:
        yield Finding(
            f"{at.removesuffix('s3')}{own}loadTimeoutSeconds",
            f"{number(timeout)} given, but to load the longest prompt, {chunks} requests of {bytes_text(row)}, "
            f"{at_once} at once, takes {number(needed)} s at a round trip of {number(_FAR_SECONDS * 1000)} ms and "
            f"{bytes_text(_CONNECTION_BYTES_PER_SECOND)}/s a connection: what comes later is computed",
            f"set it to {number(needed)} or more, or raise {own}ioThreads, unless computing is faster",
            is_note=True,
        )


def _has_identity(group: Group) -> bool:
    account = group.engine.service_account
    variables = {each.get("name") if isinstance(each, dict) else each.name for each in group.engine.extra_env_vars}
    return bool(account.annotations) or not account.create or "AWS_ACCESS_KEY_ID" in variables


def _embedded_redis(group: Group, release: Release, at: str) -> Iterator[Finding]:
    redis, embedded, row = group.engine.offload.shared_tier.redis, release.values.redis, group.memory.row
    name = embedded.existing_secret.name
    if redis.existing_secret.name and redis.existing_secret.name != name:
        yield Finding(
            f"{at}.existingSecret.name",
            f"{redis.existing_secret.name}, but the embedded server's password comes from redis.existingSecret.name "
            f"({name or 'none'}), which its engines get",
            "remove it here, and name the Secret there",
        )
    most = size(embedded.memory) * 3 // 4
    if most < row:
        yield Finding(
            "redis.memory",
            f"three quarters of {number(embedded.memory)}, {bytes_text(most)}, hold no chunk of {bytes_text(row)}",
            f"set it to {quantity(row * 4 // 3 + 1)} or more",
        )
    if redis.tenant_max_bytes is not None and size(redis.tenant_max_bytes) > most:
        yield Finding(
            f"{at}.tenantMaxBytes",
            f"{bytes_text(size(redis.tenant_max_bytes))} for one tenant is more than the embedded server holds for "
            "all: "
            f"three quarters of redis.memory, {bytes_text(most)}",
            f"set it to {most} or less",
        )
