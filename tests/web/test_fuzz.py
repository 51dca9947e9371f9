"""Whatever is sent, the answer is a success or a problem that names the cause, never an internal error."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.web.asgi import Answer, Client
from tests.web.conftest import Site
from waypost.web.actions import ACTIONS
from waypost.web.api import READS, ROOT, STORE

pytestmark = pytest.mark.promise("FACE-3")
SECRET = "correct-horse-battery"
BEARER = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}

texts = st.one_of(
    st.text(max_size=40), st.sampled_from(["orders", "main", "0" * 24, "100/m", "none", "-1", "1e999", "\0"])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
fuzzed = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def client(memory: Site) -> Client:
    memory.bury("orders", 1)
    memory.post.publish("orders", 1, key="k")
    memory.post.save_schedule("rollup", queue="reports", every=60, key="rollup", body={})
    return memory.client(secret=SECRET)


def check_answer(answer: Answer, sent: object) -> None:
    assert answer.status not in (500, 502), (sent, answer.text)
    if answer.status >= 400:
        assert answer.problem, sent
        assert answer.json()["detail"], sent


@fuzzed
@given(read=st.sampled_from(READS), place=st.tuples(texts, texts, texts), data=st.data())
def test_no_read_fails_by_its_own_fault(client: Client, read: Any, place: tuple[str, str, str], data: Any) -> None:
    known = list(read.query.__struct_fields__) or ["nothing"]
    query = data.draw(st.dictionaries(st.one_of(st.sampled_from(known), texts), texts, max_size=4))
    store, queue, id = (quote(part or "x", safe="") for part in place)
    usual = data.draw(st.booleans())
    names = {"store": "main", "queue": "orders", "id": id} if usual else {"store": store, "queue": queue, "id": id}
    path = f"{ROOT}{read.path.replace(':path', '').format(**names, name=id)}?{urlencode(query, errors='replace')}"
    check_answer(client.send("GET", path, headers=BEARER), path)


@fuzzed
@given(action=st.sampled_from(list(ACTIONS.values())), data=st.data())
def test_no_write_fails_by_its_own_fault(client: Client, action: Any, data: Any) -> None:
    fields = st.dictionaries(st.sampled_from(action.request.__struct_fields__ or ("x",)), values, max_size=6)
    sent = data.draw(st.one_of(fields, values))
    path = (ROOT + STORE + action.path).format(store="main", queue=data.draw(st.sampled_from(["orders", "none"])))
    body = json.dumps(sent).encode()
    check_answer(client.send(action.method, path, body, headers=BEARER), (action.name, sent))


@fuzzed
@given(body=st.binary(max_size=200), headers=st.dictionaries(st.sampled_from(
    ["cookie", "origin", "x-csrf-token", "idempotency-key", "x-forwarded-for", "content-type", "accept"]
), st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60), max_size=4))  # fmt: skip
def test_no_bytes_and_no_headers_break_it(client: Client, body: bytes, headers: dict[str, str]) -> None:
    for path in (f"{ROOT}/stores/main/queues/orders/cancel", "/sign-in", "/s/main/queues/orders/do/pause"):
        answer = client.send("POST", path, body, headers=headers)
        assert answer.status < 500, (path, answer.text)
