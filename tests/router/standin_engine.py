"""A real HTTP server that speaks vLLM's wire shape and fails on request.

Run as a process of its own.  It prints the port it listens on.  Control paths:
``/_behave`` (how to answer from now on), ``/_seen`` (requests so far),
``/_open`` (let requests that wait at the gate go on), ``/_drain`` (stop
listening, finish what is under way).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys

import uvicorn

DEFAULTS = {
    "status": 200,  # of the answer
    "location": "",  # where a redirect leads
    "body": None,  # JSON of an answer with another status
    "gate": "",  # wait: "before" the status, "after_headers", "after_first"
    "die": "",  # SIGKILL itself at the same places
    "chunks": None,  # latin-1 strings, the stream's exact pieces
    "empty": False,  # 200 and nothing else
    "no_params": False,  # no kv_transfer_params in the answer
    "turn": None,  # kvt_turn in kv_transfer_params
    "health": 200,  # 0 never answers
    "times": -1,  # answer so that many times, then as by default
}


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.listener: asyncio.Server | None = None
        self.seen: list[dict] = []
        self.behaviour = dict(DEFAULTS)
        self.gate = asyncio.Event()
        self.health_checks = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path.startswith("/_"):
            await self.control(path, body, send)
        elif path == "/health":
            self.health_checks += 1
            status = self.behaviour["health"]
            if status == 0:
                await asyncio.Event().wait()
            await reply(send, status, {})
        elif path == "/v1/models":
            await reply(send, 200, {"object": "list", "data": [{"id": "m", "owner": self.name}]})
        else:
            await self.generate(scope, body, receive, send)

    async def control(self, path, body, send) -> None:
        answer: object = {}
        if path == "/_behave":
            self.behaviour = {**DEFAULTS, **json.loads(body)}
            self.gate.clear()
        elif path == "/_reset":
            self.seen.clear()
            self.health_checks = 0
            self.behaviour = dict(DEFAULTS)
            self.gate.set()
        elif path == "/_open":
            self.gate.set()
        elif path == "/_drain":
            self.listener.close()
        elif path == "/_seen":
            answer = {"requests": self.seen, "health_checks": self.health_checks}
        await reply(send, 200, answer)

    async def generate(self, scope, body, receive, send) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        record = {
            "path": scope["path"],
            "headers": headers,
            "body": json.loads(body),
            "text": body.decode(),
            "end": "open",
        }
        self.seen.append(record)
        behaviour = self.behaviour
        if behaviour["times"] > 0:
            behaviour["times"] -= 1
            if behaviour["times"] == 0:
                self.behaviour = dict(DEFAULTS)
        work = asyncio.ensure_future(self.answer(record, behaviour, send))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        record["end"] = "complete" if work.done() else "gone"
        for task in (work, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def stop_at(self, place: str, behaviour: dict) -> None:
        if behaviour["gate"] == place:
            await self.gate.wait()
        if behaviour["die"] == place:
            await asyncio.sleep(0.05)  # the kernel takes what was written
            os.kill(os.getpid(), signal.SIGKILL)

    async def answer(self, record: dict, behaviour: dict, send) -> None:
        body = record["body"]
        await self.stop_at("before", behaviour)
        if behaviour["status"] != 200:
            error = {"error": {"message": "told to", "code": behaviour["status"]}}
            told = behaviour["body"] or error
            await reply(send, behaviour["status"], told, behaviour["location"])
            return
        prefix = "chatcmpl-" if "chat" in record["path"] else "cmpl-"
        identity = {"id": prefix + record["headers"].get("x-request-id", ""), "model": "m"}
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            returned = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.name,
                "remote_request_id": identity["id"],
                "remote_block_ids": [[1, 2]],
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
            }
            if behaviour["turn"] is not None:
                returned["kvt_turn"] = behaviour["turn"]
            answer = {**identity, "choices": [], "kv_transfer_params": returned}
            if behaviour["no_params"]:
                answer["kv_transfer_params"] = None
            await reply(send, 200, answer)
        elif behaviour["empty"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif body.get("stream"):
            await self.stream(identity, behaviour, send)
        else:
            text = f"from {self.name}"
            choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
            await reply(
                send,
                200,
                {**identity, "object": "chat.completion", "created": 0, "choices": [choice]},
            )

    async def stream(self, identity: dict, behaviour: dict, send) -> None:
        chunks = behaviour["chunks"]
        if chunks is None:
            pieces = [{"role": "assistant", "content": ""}, {"content": "from "}]
            events = [
                {
                    **identity,
                    "object": "chat.completion.chunk",
                    "created": 0,
                    "choices": [{"index": 0, "delta": piece, "text": piece["content"]}],
                }
                for piece in [*pieces, {"content": self.name}]
            ]
            chunks = [f"data: {json.dumps(event)}\n\n" for event in events]
            chunks.append("data: [DONE]\n\n")
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.stop_at("after_headers", behaviour)
        for number, chunk in enumerate(chunks):
            await send(
                {
                    "type": "http.response.body",
                    "body": chunk.encode("latin-1"),
                    "more_body": True,
                }
            )
            # Each piece in a write and, as good as always, a segment of its own.
            await asyncio.sleep(0.002)
            if number == 0:
                await self.stop_at("after_first", behaviour)
        await send({"type": "http.response.body", "body": b""})


async def reply(send, status: int, value: object, location: str = "") -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if location:
        headers.append((b"location", location.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    name, host, port = sys.argv[1:4]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, int(port)))
    listener.listen(512)
    asyncio.run(serve(Engine(name), listener))


async def serve(engine: Engine, listener: socket.socket) -> None:
    config = uvicorn.Config(
        engine, log_level="error", lifespan="off", ws="none", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(0.005)
    engine.listener = server.servers[0]
    print(listener.getsockname()[1], flush=True)  # noqa: T201 - for whoever started it
    await task


if __name__ == "__main__":
    main()
