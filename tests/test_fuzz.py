"""The OpenAPI document, fuzzed: whatever its schemas allow, and much that they do not, is no 5xx.

Schemathesis makes the requests and hypothesis chooses them, always the same ones. Needs
`pip install -r requirements-clients.txt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from server_fixture import Server, scripted_engine, serve

pytestmark = [
    pytest.mark.clients,
    # The libraries' own, not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_EXAMPLES = 60


@pytest.fixture(scope="module")
def stub() -> Iterator[Server]:
    with serve(scripted_engine(max_num_seqs=8), max_queue=32) as server:
        yield server


def operations(server: Server) -> list[Any]:
    """Every method of every path in the document the server hands out."""
    import schemathesis

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    results: list[Any] = list(schema.get_all_operations())
    return [result.ok() for result in results]


def aim(body: object) -> None:
    """Name the model that is served, or all would be 404, and ask for a few tokens only."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "stub"
    for name, limit in (("max_tokens", 3), ("max_completion_tokens", 3), ("n", 3), ("best_of", 3)):
        if type(body.get(name)) is int:
            body[name] = min(body[name], limit)


def fuzz(operation: Any, mode: Any) -> set[int]:
    """Send what is generated for one operation; the statuses that came back, none of them 5xx."""
    seen: set[int] = set()

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        aim(case.body)
        response = case.call(timeout=60)
        seen.add(response.status_code)
        assert response.status_code < 500, (response.text, case.as_curl_command())
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, case.as_curl_command()

    ask()
    return seen


def test_no_request_of_the_document_gives_5xx(stub: Server) -> None:
    from schemathesis import GenerationMode

    found = operations(stub)
    paths = {operation.path for operation in found}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= paths
    statuses: dict[str, set[int]] = {}
    for operation in found:
        seen = fuzz(operation, GenerationMode.POSITIVE)
        if operation.body.items:
            seen |= fuzz(operation, GenerationMode.NEGATIVE)
        statuses[operation.label] = seen
    for label in ("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize"):
        assert {200, 400} <= statuses[label], f"{label} was not really tried: {statuses}"
    stub.assert_idle()
