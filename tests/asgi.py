"""An ASGI app driven message by message, without a socket: what an HTTP server does around it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 60.0
"""What takes longer hangs."""


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A coroutine as an ordinary test; what hangs fails."""

    @functools.wraps(test)
    def run_it(**fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(**fixtures)

        asyncio.run(limited())

    return run_it


class Conversation:
    """One request as an HTTP server has it: what was sent back, and the client's going away."""

    def __init__(self, app: Any, scope: dict[str, Any], pieces: list[bytes]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._pieces = pieces
        self.is_cut = False  # the client leaves in the middle of its body
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            body = self._pieces.pop(0)
            return {
                "type": "http.request",
                "body": body,
                "more_body": self.is_cut or bool(self._pieces),
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._news.set()

    async def until(self, num_messages: int) -> None:
        while len(self.messages) < num_messages:
            self._news.clear()
            await self._news.wait()

    def disconnect(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self, status: int) -> dict[str, Any]:
        """E01: all four keys, whatever went wrong."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        assert set(self.json()) == {"error"}
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def events(self) -> list[Any]:
        """Of a whole stream, without `[DONE]`."""
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if event[0] != ":"]


class Client:
    def __init__(self, app: Any) -> None:
        self.app = app

    def open(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        pieces: list[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Conversation:
        given = {k.lower().encode(): v.encode("latin-1") for k, v in (headers or {}).items()}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": list(given.items()),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return Conversation(self.app, scope, pieces or [json.dumps(body).encode()])

    async def request(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        conversation = self.open(method, path, body, **more)
        await conversation.task
        return conversation

    async def get(self, path: str, **more: Any) -> Any:
        return await self.request("GET", path, **more)

    def post(self, body: object, *, chat: bool = False, **more: Any) -> Conversation:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if isinstance(body, dict):
            body = {"model": "tiny", **body}
        return self.open("POST", path, body, **more)

    async def complete(self, body: object, **more: Any) -> Conversation:
        conversation = self.post(body, **more)
        await conversation.task
        return conversation

    async def ready(self) -> None:
        while (await self.get("/health")).status != 200:
            await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Nothing runs, waits or is held, and the books balance."""
        while (await self.metric("vllm:num_requests_running")) + (
            await self.metric("vllm:num_requests_waiting")
        ):
            await asyncio.sleep(0.001)
        assert await self.metric("vllm:kv_cache_usage_perc") == 0
        invariants = await self.get("/debug/invariants")
        assert invariants.status == 200, invariants.body

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.get("/metrics")).body.decode()
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, name
        return sum(found)
