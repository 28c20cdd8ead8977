"""The app without a socket: paths, ids, keys, errors, streams, ends, driven message by message."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgi import PATIENCE_S, Client, on_loop
from helpers import break_rows_of, fail_once, tiny_engine

import nanoserve
from nanoserve.config import ServerConfig
from nanoserve.engine.engine import Engine
from nanoserve.server import create_app, exchange, front
from nanoserve.server.app import EnvironmentApp
from nanoserve.server.logs import describe, request_id_of
from nanoserve.server.service import public_name
from nanoserve.server.visits import Visit, Visits

ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}


@asynccontextmanager
async def serving(
    engine: Engine | None = None, *, warm: bool = True, stop: Any = None, **settings: Any
) -> AsyncIterator[Client]:
    engine = engine or tiny_engine()
    config = ServerConfig(served_model_name="tiny", **settings)
    app = create_app(engine, config, stop=stop)
    async with app.router.lifespan_context(app):
        client = Client(app)
        if warm:
            await client.ready()
        yield client


@on_loop
async def test_a_completion_plain_and_streamed() -> None:
    async with serving() as client:
        body = {"prompt": "bad wolf", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        plain = await client.complete(body)
        assert plain.status == 200
        assert plain.headers["content-type"] == "application/json"
        answer = plain.json()
        assert answer["id"].startswith("cmpl-")
        assert answer["system_fingerprint"].startswith("fp_")
        streamed = await client.complete({**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.headers["x-accel-buffering"] == "no"
        text = "".join(event["choices"][0]["text"] for event in streamed.events())
        assert text == answer["choices"][0]["text"]
        await client.idle()


@on_loop
async def test_each_token_is_sent_before_the_next_is_computed() -> None:
    engine = tiny_engine()
    letter = engine.tokenizer.encode("a")[0]
    grants, execute = threading.Semaphore(0), engine.executor.execute
    async with serving(engine) as client:
        engine.executor.execute = lambda batch: (grants.acquire(), execute(batch))[1]  # type: ignore[method-assign]
        body = {"prompt": [1], "max_tokens": 5, "logit_bias": {str(letter): 100}}
        stream = client.post({**body, "stream": True})
        for number in range(1, 6):
            grants.release()
            await stream.until(1 + number)
            assert stream.messages[number]["body"].count(b'"text":"a"') == 1
        await stream.task
        assert stream.body.endswith(b"data: [DONE]\n\n")


@on_loop
async def test_a_chat() -> None:
    async with serving() as client:
        body = {"messages": [{"role": "user", "content": "bad wolf"}], "max_tokens": 4}
        answer = (await client.complete(body, chat=True)).json()
        assert answer["id"].startswith("chatcmpl-")
        assert answer["choices"][0]["message"]["role"] == "assistant"


@on_loop
async def test_nothing_is_sent_before_the_first_token() -> None:
    engine = tiny_engine()
    let_go, execute = threading.Event(), engine.executor.execute
    async with serving(engine) as client:
        engine.executor.execute = lambda batch: (let_go.wait(PATIENCE_S), execute(batch))[1]  # type: ignore[method-assign]
        stream = client.post({**ENDLESS, "max_tokens": 2, "stream": True})
        await asyncio.sleep(0.05)
        assert not stream.messages
        let_go.set()
        await stream.task
        assert len(stream.events()) == 2


@on_loop
async def test_silence_is_filled_by_comments_and_an_error_then_is_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.03)
    engine = tiny_engine()
    let_go, execute = threading.Event(), engine.executor.execute
    async with serving(engine) as client:

        def fail_late(batch: Any) -> Any:
            let_go.wait(PATIENCE_S)
            engine.executor.execute = execute  # type: ignore[method-assign]
            raise RuntimeError("at /secret/path")

        engine.executor.execute = fail_late  # type: ignore[method-assign]
        stream = client.post({**ENDLESS, "stream": True})
        await stream.until(3)
        assert stream.status == 200
        assert [m["body"] for m in stream.messages[1:3]] == [b": keep-alive\n\n"] * 2
        let_go.set()
        await stream.task
        (event,) = stream.events()
        assert event["error"]["code"] == "engine_step"
        assert "secret" not in event["error"]["message"]
        assert (await client.complete({"prompt": [1], "max_tokens": 2})).status == 200


@on_loop
async def test_every_response_has_an_id() -> None:
    async with serving() as client:
        kept = await client.get("/live", headers={"X-Request-Id": "mine-1"})
        assert kept.headers["x-request-id"] == "mine-1"
        made = [await client.get("/live") for _ in range(2)]
        ids = {response.headers["x-request-id"] for response in made}
        assert len(ids) == 2
        assert all(re.fullmatch("req-[0-9a-f]{32}", name) for name in ids)
        evil = await client.get("/live", headers={"X-Request-Id": "a b\r\nc"})
        assert evil.headers["x-request-id"].startswith("req-")
        lost = await client.get("/nowhere", headers={"X-Request-Id": "mine-2"})
        assert lost.headers["x-request-id"] == "mine-2"


@on_loop
async def test_unknown_urls_and_wrong_methods_are_errors_too() -> None:
    async with serving() as client:
        error = (await client.get("/v2/nowhere")).error(404)
        assert error["code"] == "unknown_url"
        assert "GET /v2/nowhere" in error["message"]
        wrong = await client.get("/v1/completions")
        assert wrong.error(405)["code"] == "method_not_allowed"
        assert wrong.headers["allow"] == "POST"
        assert (await client.request("PATCH", "/health")).error(405)
        assert (await client.get("/v1/models/none")).error(404)["code"] == "model_not_found"


@pytest.mark.parametrize("root_path", ["/llm", "/llm/", "/", ""])
@on_loop
async def test_a_proxys_prefix_opens_the_same_doors(root_path: str) -> None:
    async with serving(root_path=root_path, api_key="k") as client:
        for prefix in {"", root_path.rstrip("/")}:
            assert (await client.get(f"{prefix}/health")).status == 200
            assert (await client.get(f"{prefix}/v1/models")).status == 401
            key = {"authorization": "Bearer k"}
            assert (await client.get(f"{prefix}/v1/models", headers=key)).status == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1//models", "//v1/models", "/v1/models/", "/v1///models//"]
)
@on_loop
async def test_slashes_too_many_change_nothing(path: str) -> None:
    async with serving(warm=False) as client:
        listed = (await client.get(path)).json()
        (model,) = listed["data"]
        assert listed["object"] == "list"
        assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "nanoserve")
        assert isinstance(model["created"], int)


@on_loop
async def test_a_models_name_may_hold_slashes() -> None:
    app = create_app(tiny_engine(), ServerConfig(served_model_name="org/tiny"))
    response = await Client(app).get("/v1/models/org/tiny")
    assert response.json()["id"] == "org/tiny"


@on_loop
async def test_head_asks_as_get_and_options_needs_no_cors() -> None:
    async with serving() as client:
        assert (await client.request("HEAD", "/health")).status == 200
        assert (await client.request("HEAD", "/v1/models")).status == 200
        options = await client.request("OPTIONS", "/v1/completions")
        assert options.status == 204
        assert options.headers["allow"] == "POST"
        assert "access-control-allow-origin" not in options.headers


@on_loop
async def test_pages_of_named_origins_may_ask() -> None:
    origin = {"Origin": "https://a.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    async with serving(allowed_origins=("https://a.example",), api_key="secret") as client:
        asked = await client.request("OPTIONS", "/v1/completions", headers=preflight)
        assert asked.status == 200
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        refused = await client.get("/v1/models", headers=origin)
        assert refused.error(401)
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = {**preflight, "Origin": "https://b.example"}
        foreign = await client.request("OPTIONS", "/v1/completions", headers=other)
        assert "access-control-allow-origin" not in foreign.headers


@on_loop
async def test_a_key_is_asked_of_everybody_but_probers() -> None:
    async with serving(api_key="sécret") as client:
        for path in ("/v1/models", "/metrics", "/version", "/debug/invariants", "/nowhere"):
            assert (await client.get(path)).error(401)["code"] == "invalid_api_key"
        key = "sécret".encode().decode("latin-1")
        for wrong in ("Bearer", "Bearer ", "Bearer x", key, f"Basic {key}", f"Bearer {key}x"):
            response = await client.get("/v1/models", headers={"Authorization": wrong})
            assert response.error(401)
        for right in (f"Bearer {key}", f"bearer  {key}"):
            response = await client.get("/v1/models", headers={"Authorization": right})
            assert response.status == 200
        for path in ("/health", "/live", "//live"):
            assert (await client.get(path)).status == 200
        assert (await client.request("OPTIONS", "/v1/completions")).status == 204


@on_loop
async def test_any_key_will_do_where_none_is_set() -> None:
    async with serving() as client:
        response = await client.get("/v1/models", headers={"Authorization": "Bearer whatever"})
        assert response.status == 200


@on_loop
async def test_health_waits_for_the_warm_up_and_live_does_not() -> None:
    engine = tiny_engine()
    let_go, warm_up = threading.Event(), engine.executor.warm_up
    engine.executor.warm_up = lambda: (let_go.wait(PATIENCE_S), warm_up())[1]  # type: ignore[method-assign]
    async with serving(engine, warm=False) as client:
        cold = await client.get("/health")
        assert "warming up" in cold.error(503)["message"]
        assert cold.headers["retry-after"]
        assert (await client.get("/live")).status == 200
        let_go.set()
        await client.ready()
        assert (await client.get("/health")).json() == {"status": "ok"}


@on_loop
async def test_beyond_the_queue_it_is_429_at_once() -> None:
    async with serving(tiny_engine(max_num_seqs=2), max_queue=1) as client:
        inside = [client.post({**ENDLESS, "stream": True}) for _ in range(3)]
        for stream in inside[:2]:
            await stream.until(2)
        refused = await client.complete(ENDLESS)
        assert refused.error(429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        for stream in inside:
            stream.disconnect()
            await stream.task
        assert (await client.complete({"prompt": [1], "max_tokens": 1})).status == 200
        await client.idle()
        assert await client.metric("nanoserve:refused_requests_total") == 1


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_client_that_leaves_is_forgotten(stream: bool) -> None:
    async with serving(tiny_engine(max_num_seqs=2)) as client:
        body = {**ENDLESS, "n": 3, "stream": stream}
        leaving = [client.post(body) for _ in range(3)]
        while not await client.metric("vllm:num_requests_running"):
            await asyncio.sleep(0.001)
        for conversation in leaving:
            conversation.disconnect()
            await conversation.task
        await client.idle()
        assert await client.metric("nanoserve:disconnects_total") == 3
        assert await client.metric("vllm:request_success_total", finished_reason="abort") == 3


@on_loop
async def test_a_client_may_leave_before_its_body_is_there() -> None:
    async with serving() as client:
        conversation = client.open("POST", "/v1/completions", pieces=[b"{"])
        conversation.is_cut = True
        conversation.disconnect()
        await conversation.task
        assert not conversation.messages
        await client.idle()


@on_loop
async def test_a_cancelled_request_gives_its_place_back() -> None:
    async with serving() as client:
        conversation = client.post({**ENDLESS, "stream": True})
        await conversation.until(2)
        conversation.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await conversation.task
        await client.idle()


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_failed_step_is_a_500_with_the_requests_id(stream: bool) -> None:
    engine = tiny_engine()
    async with serving(engine) as client:
        fail_once(engine)
        failed = await client.complete({**ENDLESS, "stream": stream})
        error = failed.error(500)
        assert error["code"] == "engine_step"
        assert re.search("cmpl-[0-9a-f]{32}", error["message"])
        assert failed.headers["x-request-id"] in error["message"]
        assert "hiccup" not in error["message"]
        assert (await client.complete({"prompt": [1], "max_tokens": 1})).status == 200
        await client.idle()
        assert await client.metric("nanoserve:failed_steps_total") == 1


@on_loop
async def test_a_broken_row_ends_its_stream_by_an_error_event() -> None:
    engine = tiny_engine()
    async with serving(engine) as client:
        stream = client.post({**ENDLESS, "stream": True})
        await stream.until(2)
        (name,) = [n for n in engine._groups if n.startswith("cmpl-")]
        break_rows_of(engine, name)
        await stream.task
        assert stream.events()[-1]["error"]["code"] == "engine_broken"
        assert await client.metric("nanoserve:broken_rows_total") == 1
        await client.idle()


@on_loop
async def test_the_deadline_is_a_408_that_nobody_retries() -> None:
    async with serving(request_timeout=1e-6) as client:
        for stream in (True, False):
            late = await client.complete({**ENDLESS, "stream": stream})
            assert late.error(408)["code"] == "timeout"
            assert late.headers["x-should-retry"] == "false"
        await client.idle()


@on_loop
async def test_what_the_engine_refuses_is_a_400() -> None:
    async with serving(tiny_engine(kv_cache_memory_bytes=300_000, max_model_len=64)) as client:
        error = (await client.complete({"prompt": [1] * 64, "max_tokens": 4})).error(400)
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"true",
        b'"x"',
        b"\xff",
        b"{}",
        b"[" * 100_000,
        b'{"model": NaN}',
        b"1" * 5000,
    ],
    ids=range(10),
)
@on_loop
async def test_a_body_that_is_no_request_is_a_400(raw: bytes) -> None:
    async with serving() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refused = await client.request("POST", path, pieces=[raw])
            assert refused.error(400)["type"] == "invalid_request_error"
        await client.idle()


@on_loop
async def test_a_body_has_a_limit_announced_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.refusals, "MAX_BODY_BYTES", 1000)
    async with serving() as client:
        for path in ("/v1/completions", "/tokenize"):
            announced = await client.request("POST", path, headers={"Content-Length": "1001"})
            assert announced.error(413)["code"] == "request_too_large"
            pieces = [b'{"a": "' + b"x" * 400, b"x" * 400, b"x" * 400, b'"}']
            assert (await client.request("POST", path, pieces=pieces)).error(413)


@on_loop
async def test_a_long_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    prepare = exchange.prepare

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prepare(*arguments)

    monkeypatch.setattr(exchange, "prepare", noting)
    async with serving() as client:
        for prompt in ("bad", "bad " * 2000):
            await client.complete({"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 10})
    assert threads[0] == "MainThread"
    assert threads[1].startswith("nanoserve")


@on_loop
async def test_what_nobody_foresaw_is_a_500_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("at /secret/path")

    async with serving() as client:
        monkeypatch.setattr(exchange, "read_completion", explode)
        error = (await client.complete(ENDLESS, headers={"X-Request-Id": "mine"})).error(500)
        assert error["code"] == "internal_error"
        monkeypatch.setattr("nanoserve.server.tokens.tokenizer_info", explode)
        error = (await client.get("/tokenizer_info", headers={"X-Request-Id": "yours"})).error(500)
        assert error["code"] == "internal_error"
        assert "secret" not in json.dumps(error)
        await client.idle()
    for name in ("mine", "yours"):
        (record,) = [r for r in caplog.records if r.exc_info and f"id={name}" in r.getMessage()]
        assert record.levelno == logging.ERROR


@on_loop
async def test_tokens_there_and_back() -> None:
    async with serving() as client:
        body = {"prompt": "bad<|endoftext|>", "return_token_strs": True}
        counted = (await client.request("POST", "/tokenize", body)).json()
        assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
        assert counted["tokens"][-1] == 382
        assert counted["max_model_len"] == 256
        back = await client.request("POST", "/detokenize", {"tokens": counted["tokens"]})
        assert back.json() == {"prompt": "bad<|endoftext|>"}
        messages = [{"role": "user", "content": "bad<|endoftext|>"}]
        chat = (await client.request("POST", "/tokenize", {"messages": messages})).json()
        assert 382 not in chat["tokens"]
        info = (await client.get("/tokenizer_info")).json()
        assert (info["vocab_size"], info["eos_token_id"]) == (383, 382)


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [383]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
@on_loop
async def test_a_wrong_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as client:
        assert (await client.request("POST", path, body)).error(400)["param"] == param


@on_loop
async def test_another_model_is_not_found() -> None:
    async with serving() as client:
        for path in ("/v1/completions", "/tokenize"):
            body = {"model": "other", "prompt": "a"}
            assert (await client.request("POST", path, body)).error(404)["param"] == "model"


@on_loop
async def test_version_and_fingerprint_tell_what_runs() -> None:
    async with serving(tiny_engine()) as one, serving(tiny_engine(dtype="bfloat16")) as other:
        versions = [(await client.get("/version")).json() for client in (one, other)]
        assert versions[0]["version"] == nanoserve.__version__
        assert versions[0]["engine"]["dtype"] == "float32"
        assert "/" not in json.dumps(versions[0]["engine"]["model"])
        prints = {version["system_fingerprint"] for version in versions}
        assert len(prints) == 2
        answer = (await one.complete({"prompt": [1], "max_tokens": 1})).json()
        assert answer["system_fingerprint"] in prints


@on_loop
async def test_a_requests_account_is_found_by_each_of_its_ids() -> None:
    async with serving() as client:
        body = {"prompt": [[1, 2, 3], [4]], "max_tokens": 4, "ignore_eos": True, "n": 2}
        done = await client.complete(body, headers={"X-Request-Id": "mine"})
        reply_id = done.json()["id"]
        for name in ("mine", reply_id, f"{reply_id}-1"):
            account = (await client.get(f"/debug/requests/{name}")).json()
            assert account["id"] == reply_id
            assert account["request_id"] == "mine"
            assert (account["status"], account["outcome"]) == (200, "done")
            assert account["num_prompt_tokens"] == 4
            assert len(account["choices"]) == 4
        choice = account["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["num_output_tokens"] == 4
        assert sum(step["num_tokens"] for step in choice["steps"]) == 3 + 3
        assert 0 <= choice["first_scheduled_ms"] <= choice["first_token_ms"]
        error = (await client.get("/debug/requests/unknown")).error(404)
        assert error["code"] == "request_not_found"


@on_loop
async def test_an_account_can_be_looked_at_while_it_runs() -> None:
    async with serving() as client:
        stream = client.post({**ENDLESS, "stream": True}, headers={"X-Request-Id": "mine"})
        await stream.until(2)
        account = (await client.get("/debug/requests/mine")).json()
        assert account["outcome"] != "done"
        assert account["choices"][0]["status"] == "running"
        stream.disconnect()
        await stream.task
        account = (await client.get("/debug/requests/mine")).json()
        assert account["outcome"] == "disconnected"


def test_only_the_most_recent_visits_are_kept() -> None:
    visits = Visits(limit=2)
    for number in range(4):
        visits.add(
            Visit(
                request_id="same" if number < 3 else "last",
                method="POST",
                path="/",
                received_s=0.0,
                reply_id=f"cmpl-{number}",
            )
        )
    assert visits.find("cmpl-1") is None
    assert visits.find("cmpl-2") is visits.find("same")
    assert visits.find("cmpl-3-0") is visits.find("last")
    assert len(visits._by_reply) == len(visits._by_request) == 2


METRIC_NAMES = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_sum"),
    *("vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count"),
    *("vllm:request_success_total", "process_resident_memory_bytes"),
)


@on_loop
async def test_metrics_have_the_names_that_dashboards_know() -> None:
    async with serving() as client:
        for _ in range(2):  # the second finds the first one's blocks
            await client.complete({"prompt": [7] * 40, "max_tokens": 3, "ignore_eos": True})
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        for name in METRIC_NAMES:
            await client.metric(name)
        assert await client.metric("vllm:prompt_tokens_total", model_name="tiny") == 80
        assert await client.metric("vllm:generation_tokens_total") == 6
        assert await client.metric("vllm:prefix_cache_hits_total") == 32
        assert await client.metric("vllm:time_to_first_token_seconds_count") == 2
        assert await client.metric("vllm:inter_token_latency_seconds_count") == 4
        assert await client.metric("vllm:request_success_total", finished_reason="length") == 2
        assert await client.metric("nanoserve:http_responses_total", status="200") > 2
        assert await client.metric("nanoserve:thread_cpu_seconds_total", thread="engine") > 0
        assert await client.metric("nanoserve:thread_cpu_seconds_total", thread="event_loop") > 0
        body = {"prompt": [7], "max_tokens": 3, "ignore_eos": True, "stream": True}
        await client.complete(body)
        assert await client.metric("nanoserve:token_delivery_seconds_count") == 3
        bucket = "vllm:time_to_first_token_seconds_bucket"
        assert await client.metric(bucket, le="+Inf") == 3


@on_loop
async def test_two_servers_count_by_themselves() -> None:
    async with serving() as one, serving() as other:
        await one.complete({"prompt": [1], "max_tokens": 1, "ignore_eos": True})
        assert await one.metric("vllm:generation_tokens_total") == 1
        assert await other.metric("vllm:generation_tokens_total") == 0


@on_loop
async def test_the_openapi_document_holds_the_bodies() -> None:
    async with serving() as client:
        document = (await client.get("/openapi.json")).json()
        for path, required in (
            ("/v1/completions", {"model", "prompt"}),
            ("/v1/chat/completions", {"model", "messages"}),
            ("/detokenize", {"tokens"}),
        ):
            body = document["paths"][path]["post"]["requestBody"]
            schema = body["content"]["application/json"]["schema"]
            assert set(schema["required"]) == required
            assert "default" in document["paths"][path]["post"]["responses"]
        assert "422" not in json.dumps(document["paths"])


@on_loop
async def test_sigterm_lets_those_inside_finish_and_nobody_in() -> None:
    stopped: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    async with serving(stop=stopped.append) as client:
        stream = client.post({**ENDLESS, "max_tokens": 40, "stream": True})
        await stream.until(2)
        signal.raise_signal(signal.SIGTERM)
        while (await client.get("/health")).status != 503:
            await asyncio.sleep(0.001)
        refused = await client.complete(ENDLESS)
        assert refused.error(503)["code"] == "not_serving"
        assert refused.headers["retry-after"]
        assert (await client.get("/live")).status == 200
        assert not stopped
        await stream.task
        assert stream.events()[-1]["choices"][0]["finish_reason"] == "length"
        while not stopped:
            await asyncio.sleep(0.001)
        assert stopped == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == before


@on_loop
async def test_who_does_not_finish_in_time_hears_of_it() -> None:
    stopped: list[int] = []
    engine = tiny_engine(max_num_seqs=1)
    async with serving(engine, stop=stopped.append, shutdown_timeout=0.05) as client:
        execute = engine.executor.execute
        pace = threading.Event()

        def slowly(batch: Any) -> Any:
            pace.wait(0.01)
            return execute(batch)

        engine.executor.execute = slowly  # type: ignore[method-assign]
        running = client.post({**ENDLESS, "stream": True})
        await running.until(2)
        queued = client.post({**ENDLESS, "stream": True})
        await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.gather(running.task, queued.task)
        assert running.events()[-1]["error"]["code"] == "not_serving"
        assert queued.error(503)["code"] == "not_serving"
        while not stopped:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
@on_loop
async def test_an_interrupt_or_a_second_signal_ends_everything_at_once(signals: list[int]) -> None:
    stopped: list[int] = []
    async with serving(stop=stopped.append, shutdown_timeout=PATIENCE_S) as client:
        stream = client.post({**ENDLESS, "n": 8, "stream": True})
        await stream.until(2)
        for number in signals:
            signal.raise_signal(number)
            await asyncio.sleep(0)
        await stream.task
        assert stream.events()[-1]["error"]["code"] == "not_serving"
        while not stopped:
            await asyncio.sleep(0.001)
        assert stopped == signals[:1]


@on_loop
async def test_ending_the_app_ends_its_thread() -> None:
    engine = tiny_engine()
    async with serving(engine) as client:
        stream = client.post({**ENDLESS, "stream": True})
        await stream.until(2)
    await stream.task
    assert stream.events()[-1]["error"]["code"] == "not_serving"
    assert "nanoserve-engine" not in [thread.name for thread in threading.enumerate()]


async def start(app: Any) -> list[dict[str, Any]]:
    """What a server hears of an app that it starts and then waits for."""
    heard: list[dict[str, Any]] = []
    told = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if heard:
            told.set()
            await asyncio.Event().wait()
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, Any]) -> None:
        heard.append(message)

    task = asyncio.ensure_future(app({"type": "lifespan"}, receive, send))
    waiting = asyncio.ensure_future(told.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for ended in (task, waiting):
        ended.cancel()
    await asyncio.gather(task, waiting, return_exceptions=True)
    return heard


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("NANOSERVE_PORT", "eighty", "NANOSERVE_PORT must be an integer, got 'eighty'"),
        ("NANOSERVE_MAX_QUEUE", "-1", "--max-queue must be at least 0"),
        ("NANOSERVE_MODEL", "/no/such/folder", "/no/such/folder"),
        ("NANOSERVE_CHAT_TEMPLATE", "{% if %}", "chat template"),
    ],
)
@on_loop
async def test_an_environment_that_cannot_be_honoured_is_reported(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (heard,) = await start(EnvironmentApp())
    assert heard["type"] == "lifespan.startup.failed"
    assert message in heard["message"]


@on_loop
async def test_without_its_start_the_environments_app_says_so() -> None:
    with pytest.raises(RuntimeError, match="lifespan"):
        await Client(EnvironmentApp()).get("/live")


def test_ids_of_callers_are_kept_only_where_they_are_harmless() -> None:
    assert request_id_of(b"abc-1_2/3:4") == "abc-1_2/3:4"
    for bad in (None, b"", b"a b", b"a\n", b"x" * 129, "é".encode()):
        assert request_id_of(bad).startswith("req-")


def test_log_lines_cannot_be_forged() -> None:
    line = describe("request", path='/a" b\nrequest id=x', ms=1.23456, status=None)
    assert line == 'request path="/a\\" b\\nrequest id=x" ms=1.235'


@pytest.mark.parametrize(
    "model, name",
    [
        ("mini", "mini"),
        ("openai-community/gpt2", "openai-community/gpt2"),
        ("/home/someone/models/mine/", "mine"),
        ("./mine", "mine"),
        ("a/b/c", "c"),
        ("/", "model"),
    ],
)
def test_a_models_public_name_is_no_path(model: str, name: str) -> None:
    assert public_name(model) == name
