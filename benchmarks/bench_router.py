"""What the router adds to the first byte: the same two legs, with it and without.

The engines here answer at once, so that nothing but the way is measured.  A
*direct* turn is what a client would do itself: ask the prefill engine, put its
``kv_transfer_params`` into the decode engine's request, wait for the stream's
first byte.  A *routed* turn is one request to the router.  The two take turns,
on kept-alive connections; the table shows medians and the 90th percentile.

    python benchmarks/bench_router.py [--turns 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

PATH = "/v1/chat/completions"
PROMPTS = {"2 KiB prompt": 2 << 10, "64 KiB prompt": 64 << 10, "1 MiB prompt": 1 << 20}
WARM_UP = 50
TARGET_MS = 2.0

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
HANDOFF = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": []}


def main() -> None:
    """Run the benchmark, or one of its engines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        serve_engine(arguments.engine)
        return
    ports = [free_port() for _ in range(3)]
    children = [start(sys.executable, __file__, "--engine", str(port)) for port in ports[:2]]
    try:
        children.append(start_router(ports))
        results = asyncio.run(measure(ports, arguments.turns))
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(15)
    report(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def serve_engine(port: int) -> None:
    """An engine that answers at once, in vLLM's wire shape."""
    import uvicorn

    uvicorn.run(engine, port=port, log_level="error", lifespan="off")


async def engine(
    _scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """The ASGI application of ``serve_engine``."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    streamed = b'"stream":true' in body[-400:].replace(b" ", b"")
    kind = b"text/event-stream" if streamed else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if streamed:
        await send(
            {"type": "http.response.body", "body": b'data: {"id":"x"}\n\n', "more_body": True}
        )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return
    answer = json.dumps({"id": "x", "choices": [], "kv_transfer_params": HANDOFF}).encode()
    await send({"type": "http.response.body", "body": answer})


def start_router(ports: list[int]) -> subprocess.Popen[bytes]:
    """The real router as it is shipped."""
    options = ["--port", str(ports[2]), "--log-level", "warning"]
    for role, port in zip(("prefill", "decode"), ports, strict=False):
        options += [f"--{role}", f"{role}-0=http://127.0.0.1:{port}"]
    return start(sys.executable, "-m", "kvtransport_vllm.router", *options)


async def measure(ports: list[int], turns: int) -> list[dict[str, Any]]:
    """Paired turns for every prompt size."""
    prefill, decode, router = (f"http://127.0.0.1:{port}" for port in ports)
    results = []
    async with aiohttp.ClientSession() as session:
        for url in (prefill, decode, router):
            await ready(session, url)
        for name, size in PROMPTS.items():
            count = turns if size < 1 << 20 else max(turns // 4, 1)
            direct, routed = [], []
            for number in range(WARM_UP + count):
                messages = [{"role": "user", "content": f"{number} {'x' * size}"}]
                body = {"model": "m", "messages": messages, "stream": True}
                first = await direct_turn(session, prefill, decode, body)
                second = await routed_turn(session, router, body)
                if number >= WARM_UP:
                    direct.append(first)
                    routed.append(second)
            added = [b - a for a, b in zip(direct, routed, strict=True)]
            rows = {"direct": direct, "routed": routed, "added": added}
            results.append({"prompt": name, "turns": count, **summary(rows)})
    return results


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until a server answers 200 at /health, at most ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            async with session.get(url + "/health") as response:
                await response.read()
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{url} did not start")


async def direct_turn(
    session: aiohttp.ClientSession, prefill: str, decode: str, body: dict[str, Any]
) -> float:
    """Seconds to the first byte when the client does both legs itself."""
    began = time.perf_counter()
    first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL}
    async with session.post(prefill + PATH, data=json.dumps(first).encode()) as response:
        params = json.loads(await response.read())["kv_transfer_params"]
    second = {**body, "kv_transfer_params": params, "stream": True}
    return await first_byte(session, decode, second, began)


async def routed_turn(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Seconds to the first byte through the router."""
    return await first_byte(session, url, body, time.perf_counter())


async def first_byte(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], began: float
) -> float:
    """Send the request, wait for one byte, then read the rest."""
    async with session.post(url + PATH, data=json.dumps(body).encode()) as response:
        await response.content.readany()
        elapsed = time.perf_counter() - began
        await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}")
    return elapsed


def summary(rows: dict[str, list[float]]) -> dict[str, float]:
    """Medians and 90th percentiles in milliseconds."""
    result = {}
    for name, values in rows.items():
        result[f"{name}_p50_ms"] = 1e3 * statistics.median(values)
        result[f"{name}_p90_ms"] = 1e3 * sorted(values)[int(0.9 * len(values))]
    return result


def report(results: list[dict[str, Any]]) -> None:
    """Print the table and the verdict."""
    print(f"machine: {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'':16}{'direct':>18}{'routed':>18}{'added':>18}   (ms, p50 / p90)")
    for row in results:
        cells = [
            f"{row[f'{name}_p50_ms']:8.2f} /{row[f'{name}_p90_ms']:7.2f}"
            for name in ("direct", "routed", "added")
        ]
        print(f"{row['prompt']:16}" + "".join(f"{cell:>18}" for cell in cells))
    worst = results[0]["added_p50_ms"]
    verdict = "met" if worst <= TARGET_MS else "missed"
    print(f"target: at most {TARGET_MS} ms added at p50 ({results[0]['prompt']}): {verdict}")


def start(*command: str) -> subprocess.Popen[bytes]:
    """Start a process."""
    return subprocess.Popen(command)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
