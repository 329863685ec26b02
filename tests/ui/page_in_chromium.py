"""The live page in a real browser: `make test-ui`, apart from `make test` as it needs Chromium."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from ui.browser import Page, open_page

from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until

SHOTS = Path(__file__).resolve().parents[2] / "build" / "ui"
OPERATOR = "sk-o" + "0" * 40
EVIL_ID = '<img/src=x/onerror="document.title=1">'  # no blank: a request's name ends at one


@asynccontextmanager
async def gateway(engines: int, **sections: Any) -> AsyncIterator[tuple[RunningGateway, list[FakeEngine]]]:
    fakes = [FakeEngine(name=f"engine-{at}") for at in range(engines)]
    for fake in fakes:
        await fake.start(0)
    try:
        async with running_gateway(gateway_config(fakes, **sections)) as running:
            yield running, fakes
    finally:
        for fake in fakes:
            await fake.stop()


async def chat(running: RunningGateway, text: str, *, request_id: str = "", stream: bool = True) -> None:
    model = running.gateway.fleets[0].name
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]}
    headers = {"x-request-id": request_id} if request_id else {}
    url = running.url + "/v1/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


async def names_and_roles(page: Page) -> set[tuple[str, str]]:
    """Names and roles that a screen reader gets."""
    tree = await page.ask("Accessibility.getFullAXTree")
    return {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree["nodes"] if "role" in node}


async def test_the_page_follows_the_gateway() -> None:
    async with gateway(2) as (running, fakes), open_page() as page:
        await page.width(1280)
        await page.open(running.url + "/ui")
        await page.until("document.querySelectorAll('.model tbody tr').length === 2")
        await page.until("document.getElementById('status').textContent === 'live'")
        assert not await page.run("document.getElementById('no-decisions').hidden")

        await chat(running, "word " * 3000, request_id=EVIL_ID)
        await page.until("document.querySelectorAll('#decisions li').length === 1")
        await page.run("document.querySelector('#decisions summary').click()")
        await page.until("document.querySelectorAll('#decisions tbody tr').length === 2")
        assert EVIL_ID in await page.run("document.querySelector('#decisions caption').textContent")
        assert await page.run("document.querySelectorAll('#decisions tr.chosen').length") == 1

        # An open decision stays open while newer ones are added above it.
        await chat(running, "word " * 3000)
        await page.until("document.querySelectorAll('#decisions li').length === 2")
        assert await page.run("document.querySelectorAll('#decisions li')[1].querySelector('details').open")
        assert await page.run("document.querySelector('#decisions .reason').textContent") == "prefix"
        assert await page.until("/ms/.test(document.querySelector('[data-field=p50]').textContent)")
        assert await page.run("parseFloat(document.querySelector('.bar [data-tier=device]').style.flexGrow)") > 0

        await fakes[1].stop()
        await page.until("document.querySelectorAll('td[data-good=false]').length === 1")
        assert "connect" in await page.run("document.querySelector('td[data-good=false]').textContent")

        assert await page.run("document.title") == "Spillway gateway"
        assert page.problems == []
        assert all(url.startswith(running.url + "/ui") or url.endswith("/favicon.ico") for url in page.requested)


@pytest.mark.parametrize("pixels", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_can_be_read(pixels: int, scheme: str) -> None:
    async with gateway(3) as (running, _), open_page() as page:
        for group in range(3):
            for _ in range(2):
                await chat(running, f"{group} " + "word " * 2000, stream=True)
        await page.width(pixels)
        await page.colours(scheme)
        await page.open(running.url + "/ui/")
        await page.until("document.querySelectorAll('#decisions li').length === 6")
        await page.run("document.querySelector('#decisions summary').click()")
        await page.until("document.querySelectorAll('#decisions tbody tr').length === 3")
        shot = await page.screenshot()
        await asyncio.to_thread(keep_shot, f"page-{scheme}-{pixels}.png", shot)

        assert await page.run("document.documentElement.scrollWidth") <= pixels
        contrasts = await page.run(CONTRASTS)
        assert contrasts and not [each for each in contrasts if each[0] < 4.5]
        assert page.problems == []


def keep_shot(name: str, png: bytes) -> None:
    """Keep a picture for inspection; it is not compared."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / name).write_bytes(png)


# WCAG contrast of each text that is shown, against the first ground that is not transparent: [ratio, text] each.
CONTRASTS = """(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [red, green, blue] = numbers(colour).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !node.checkVisibility()) continue;
    const [one, other] = [light(getComputedStyle(node).color), light(ground(node))];
    found.push([(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), text.slice(0, 40)]);
  }
  return found;
})()"""


async def test_it_works_with_keys_alone_and_a_screen_reader() -> None:
    async with gateway(2) as (running, _), open_page() as page:
        await chat(running, "word " * 2000)
        await page.open(running.url + "/ui/")
        await page.until("document.querySelectorAll('#decisions li').length === 1")

        await page.press("Tab", 9)
        assert await page.run("document.activeElement.id") == "pause"
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('status').textContent === 'paused'")
        await page.press("Tab", 9)
        assert await page.run("document.activeElement.className") == "scroll"
        await page.press("Tab", 9)
        assert await page.run("document.activeElement.tagName") == "SUMMARY"
        await page.press("Enter", 13, "\r")
        await page.until("document.querySelector('#decisions details').open")

        elements = await names_and_roles(page)
        assert "status" in {role for role, _ in elements}
        assert ("table", "Engines") in elements
        assert {("rowheader", "engine-0"), ("columnheader", "KV in use")} <= elements
        assert any(role == "meter" and "KV in use, engine-1" in name for role, name in elements)
        assert ("heading", "Recent decisions") in elements
        assert any(role == "button" and name == "Go on" for role, name in elements)


async def test_on_the_clients_port_the_page_asks_for_an_operators_key(tmp_path: Path) -> None:
    tenants = [{"name": "operators", "keys": [hash_key(OPERATOR)], "operator": True}]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (tmp_path / "salt").write_text("0123456789abcdef" * 4)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    async with gateway(1, auth=auth) as (running, _), open_page() as page:
        await page.open(running.url + "/ui/")
        await page.until("document.activeElement.id === 'key'")
        assert await page.run("document.querySelectorAll('.model').length") == 0
        await page.type("sk-wrong")
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('status').textContent === 'unknown key'")
        await page.type(OPERATOR)
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('status').textContent === 'live'")
        await page.until("document.querySelectorAll('.model tbody tr').length === 1")

        assert OPERATOR not in await page.run("document.documentElement.outerHTML")
        assert not any(OPERATOR in url for url in page.requested)
        assert not [problem for problem in page.problems if not re.search("status of 40[13]", problem)]


async def test_a_chain_of_shared_tiers_is_shown_with_what_each_holds() -> None:
    """Both stores at the engine, and in a decision the tokens that the tier below has alone."""
    fakes = [FakeEngine(name=f"engine-{at}", publisher=KvPublisher(), block_tokens=4) for at in range(2)]
    for fake in fakes:
        await fake.start(0)
    near, far, tokens = "nvme/00000000000000aa", "s3/00000000000000bb", list(range(16))
    try:
        async with running_gateway(gateway_config(fakes)) as running, open_page() as page:
            first, second = (fake.publisher for fake in fakes)
            assert first is not None and second is not None
            first.stored([1, 2, 3, 4], None, tokens, 4)
            for publisher, keys in ((first, [1, 2]), (second, [])):
                publisher.stored(keys, None, [], 0, medium=near)
            for publisher, keys in ((first, [3, 4]), (second, [])):
                publisher.stored(keys, None, [], 0, medium=far)
            first.removed([1, 2, 3, 4])
            index = running.gateway.fleets[0].index
            await until(lambda: index.shared_reach_of("engine-1").blocks == {"nvme": 2, "s3": 2})
            body = {"model": "fake", "prompt": [*tokens, 99], "max_tokens": 1}
            url = running.url + "/v1/completions"
            async with aiohttp.ClientSession() as client, client.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()
            await page.width(1280)
            await page.open(running.url + "/ui/")
            await page.until("document.querySelectorAll('#decisions li').length === 1")
            await page.run("document.querySelector('#decisions summary').click()")
            await page.until("document.querySelectorAll('#decisions tbody tr').length === 2")
            shot = await page.screenshot()
            await asyncio.to_thread(keep_shot, "page-chain.png", shot)
            said = await page.run(
                "[...document.querySelectorAll('.model tbody td:last-child')].map(e => e.textContent)"
            )
            assert len(said) == 2 and all("2 blocks in nvme, 2 blocks in s3" in each for each in said)
            held = await page.run("document.querySelector('#decisions tbody').textContent")
            assert "16 (8 below)" in held
            assert page.problems == []
    finally:
        for fake in fakes:
            await fake.stop()
