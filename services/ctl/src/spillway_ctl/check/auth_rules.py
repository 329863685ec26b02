"""Rules of who may ask the gateway: its Secrets, the engines' key and the limits that gateways share. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spillway_ctl.check.finding import Finding, quoted, shown_url
from spillway_ctl.check.group import Release
from spillway_ctl.check.shared_rules import HOST, is_own_pod, login, many_databases, repeated

_LIMITS_URL = re.compile(rf"(rediss?://{HOST}(/[0-9]*)?|rediss?-cluster://{HOST}/?|unix:///[^?# ]+(\?db=[0-9]+)?)")


def auth_findings(release: Release) -> Iterator[Finding]:
    yield from _secrets(release)
    yield from _engine_keys(release)
    yield from _readable(release)
    yield from _shared_limits(release)
    tests = release.values.tests.api_key_secret.name
    if tests and not release.values.gateway.auth.keys_secret.name:
        yield Finding(
            "tests.apiKeySecret.name",
            f"{tests}, but the gateway requires no keys",
            "set gateway.auth.keysSecret, or remove it",
        )


def _secrets(release: Release) -> Iterator[Finding]:
    """Refuse half of the block, which would be no authentication at all."""
    auth = release.values.gateway.auth
    keys, salt, engine_key = auth.keys_secret.name, auth.salt_secret.name, auth.engine_key_secret.name
    if keys and not salt:
        yield Finding(
            "gateway.auth.saltSecret.name",
            "is empty, and with keysSecret each tenant has a cache of its own, which begins with this secret",
            "kubectl create secret generic gateway-salt "
            f"--from-literal={auth.salt_secret.key}=$(openssl rand -base64 48), and name it here",
        )
    if salt and not keys:
        yield Finding(
            "gateway.auth.saltSecret.name",
            f"{salt}, but keysSecret.name is empty",
            "name the Secret with the tenants and the hashes of their keys, or remove saltSecret",
        )
    if engine_key and not keys:
        yield Finding(
            "gateway.auth.engineKeySecret.name",
            f"{engine_key}, but keysSecret.name is empty, so that the gateway would add the engines' key to the "
            "requests "
            "of clients that have none",
            "set keysSecret and saltSecret too, or remove engineKeySecret (clients then send the engines' key "
            "themselves)",
        )
    secrets = (auth.keys_secret, auth.salt_secret, auth.engine_key_secret)
    for name, key in repeated((secret.name, secret.key) for secret in secrets if secret.name):
        yield Finding(
            "gateway.auth",
            f"{name}, entry {key}, is named by two of keysSecret, saltSecret and engineKeySecret",
            "give each a secret of its own",
        )


def _engine_keys(release: Release) -> Iterator[Finding]:
    auth = release.values.gateway.auth
    demanded: dict[tuple[str, str], str] = {}
    for group in release.groups:
        secret = group.engine.api_key_secret
        if secret.name:
            demanded[secret.name, secret.key] = f"{group.path}.apiKeySecret"
    if demanded and auth.keys_secret.name and not auth.engine_key_secret.name:
        name, key = min(demanded)
        yield Finding(
            "gateway.auth.engineKeySecret.name",
            f"is empty, but engines demand a key ({demanded[name, key]}), and clients' keys no longer reach them",
            f"set it to {{name: {name}, key: {key}}}",
        )
    if auth.engine_key_secret.name and len(demanded) > 1:
        yield Finding(
            "gateway.auth.engineKeySecret",
            "the gateway sends one key to all engines, but "
            f"{' and '.join(sorted(demanded.values()))} name different ones",
            "let all name one Secret and key",
        )


def _readable(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    auth = gateway.auth
    files = (
        auth.keys_secret.name,
        auth.salt_secret.name,
        auth.engine_key_secret.name,
        gateway.tls.secret.name,
        auth.shared_limits.ca_secret.name if auth.shared_limits.url else "",
    )
    pod = gateway.pod_security_context
    user = int(pod.get("runAsUser") or 0)
    if any(files) and user != 0 and pod.get("fsGroup") is None:
        yield Finding(
            "gateway",
            f"user {user} of its pods cannot read the files of their Secrets, which are root's alone",
            "add fsGroup to gateway.podSecurityContext",
        )


def _shared_limits(release: Release) -> Iterator[Finding]:
    values, limits, at = release.values, release.values.gateway.auth.shared_limits, "gateway.auth.sharedLimits"
    url, shown = limits.url, shown_url(limits.url)
    if "@" in url:
        yield Finding(f"{at}.url", "holds credentials", "put them into a Secret and name it in existingSecret")
    elif url and _LIMITS_URL.fullmatch(url) is None:
        yield Finding(
            f"{at}.url",
            f"{quoted(shown)} is no address",
            "write redis://host:6379/0, rediss://, redis-cluster://host:6379 (one server of the cluster, which names "
            "the "
            "others) or unix:///path?db=0, with a port from 1 to 65535",
        )
    elif url.startswith("unix:") and not values.gateway.extra_volume_mounts:
        yield Finding(
            f"{at}.url",
            f"{shown} is a socket in the pod, but nothing brings it",
            "mount its folder with gateway.extraVolumes and extraVolumeMounts",
        )
    yield from many_databases(f"{at}.url", url)
    if is_own_pod(url) and not values.gateway.sidecars and not values.gateway.init_containers:
        yield Finding(
            f"{at}.url",
            f"{shown} is the gateway's own pod, in which nothing else runs",
            "write the name of Redis's Service, such as redis://redis.cache.svc:6379/0",
        )
    if url and not values.gateway.auth.keys_secret.name:
        yield Finding(
            f"{at}.url",
            f"{shown}, but there are no tenants to limit",
            "set gateway.auth.keysSecret, or remove it",
        )
    if limits.ca_secret.name and not url.startswith("rediss"):
        yield Finding(
            f"{at}.caSecret.name",
            f"{limits.ca_secret.name}, but url speaks no TLS",
            "begin it with rediss, or remove caSecret",
        )
    if not url and limits.existing_secret.name:
        yield Finding(
            f"{at}.existingSecret.name",
            f"{limits.existing_secret.name}, but url is empty",
            "give the server's address, or remove existingSecret",
        )
    yield from login(f"{at}.existingSecret", limits.existing_secret)
    if values.redis.enabled and re.search(rf"//{re.escape(release.name('redis'))}[.:/]", f"{url}/"):
        yield Finding(
            f"{at}.url",
            f"{shown} is the embedded server, whose only user may run no scripts, and limits are one",
            "name a Redis or Valkey of your own",
        )
