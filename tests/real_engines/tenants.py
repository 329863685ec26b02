"""A tenant that sends another cache salt with each request, behind a gateway with API keys, on a tier with quotas."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from pathlib import Path

import httpx
import yaml
from stack_driver.other_gateway import other_gateway

from .fleet import Fleet

PART = "tenants"
TENANT_BYTES = 64 << 20  # ten blocks of the bundled model in float32, twenty in bfloat16
OVERRIDES = (f"offload.sharedTier.nvme.tenantMaxBytes={TENANT_BYTES}",)
BLOCKS = 4
HONEST_REQUESTS = 2
GREEDY_REQUESTS = 16
HONEST, GREEDY = "honest", "greedy"


def auth_of(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The gateway's section, with its files in this folder, and the key of each tenant."""
    keys = {tenant: secrets.token_urlsafe(24) for tenant in (HONEST, GREEDY)}
    tenants = [
        {"name": tenant, "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()]} for tenant, key in keys.items()
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_bytes(secrets.token_bytes(32))
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}, keys


def run(fleet: Fleet) -> None:
    stack = fleet.stack
    stack.store.clear()
    cores = fleet.cores()
    auth, keys = auth_of(stack.local.folder.config)
    with other_gateway(fleet.stack, "gateway-keys", {"auth": auth}) as url:

        def ask(tenant: str, salt: str) -> None:
            prompt = stack.new_prompt(BLOCKS)
            body = {"model": fleet.model, "prompt": list(prompt.tokens), "max_tokens": 1, "cache_salt": salt}
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
            assert reply.status_code == 200, reply.text

        for number in range(HONEST_REQUESTS):
            ask(HONEST, f"ours {number}")
        stack.stored()
        honest = _held(fleet)
        for number in range(GREEDY_REQUESTS):
            ask(GREEDY, f"salt {number}")
        stack.stored()
        held = _held(fleet)
    (tenant,) = honest
    others = {name: amount for name, amount in held.items() if name != tenant}
    allowed = TENANT_BYTES // stack.block_bytes
    seen = f"{len(others)} other tenant in the tier, {sum(others.values())} blocks of {GREEDY_REQUESTS * BLOCKS} stored"
    fleet.rows.add(
        PART,
        f"{GREEDY_REQUESTS} salts of one tenant, quota of {allowed} blocks",
        seen,
        len(others) == 1 and 0 < sum(others.values()) <= allowed,
    )
    seen = f"{held[tenant]} of {honest[tenant]} blocks kept"
    fleet.rows.add(PART, f"the other tenant, with {HONEST_REQUESTS} salts", seen, held[tenant] == honest[tenant] > 0)
    lost = fleet.lost_since(cores)
    fleet.rows.add(PART, "engines lost", lost, lost == 0)


def _held(fleet: Fleet) -> Counter[bytes]:
    """Blocks of each tenant that has a salt."""
    store = fleet.stack.store
    return Counter(frame.tenant for frame in store.blocks().values() if frame.tenant is not None and any(frame.tenant))
