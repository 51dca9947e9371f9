"""Who may do what: hosts, origins, secrets, sessions, CSRF tokens, scopes, proxies, read-only mode, limits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.requests import Request

from tests.web.asgi import Client
from tests.web.conftest import Site
from waypost.errors import ConfigurationError
from waypost.testing.clock import ManualClock
from waypost.web import Token, User, create_app, header_auth
from waypost.web.access import FAILURES_MAX, SESSION_SECONDS, Access, Caller
from waypost.web.actions import ACTIONS
from waypost.web.api import READS, ROOT, STORE
from waypost.web.problems import Problem

SECRET = "correct-horse-battery"
READER = Token("reader", "reader-reader-reader", frozenset(("read",)))
OPERATOR = Token("operate", "operate-operate-operate", frozenset(("operate",)))
VIEWER = Token("viewer", "viewer-viewer-viewer", frozenset(("read", "bodies")))

pytestmark = pytest.mark.promise("FACE-3")


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def orders(memory: Site) -> Site:
    memory.post.publish("orders", {"card": "4111"}, headers={"authorization": "token"})
    return memory


# ---- where a request comes from ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.2", "", "[::2]", "10.0.0.1:8080"])
def test_a_request_for_another_host_is_refused(orders: Site, host: str) -> None:
    """A name of another site that points to this machine must not read anything here (DNS rebinding)."""
    client = orders.client()
    answer = client.get("/api/v1/stores/main/queues", headers={"host": host})
    assert (answer.status, answer.problem) == (421, "wrong-host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "[::1]"])
def test_the_names_of_this_machine_are_served(orders: Site, host: str) -> None:
    assert orders.client().get("/api/v1/stores", headers={"host": host}).status == 200


def test_a_host_that_was_given_is_served(orders: Site) -> None:
    client = orders.client(secret=SECRET, hosts=["ops.example.com"])
    headers = bearer(SECRET) | {"host": "ops.example.com"}
    assert client.get("/api/v1/stores", headers=headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_write_by_a_page_of_another_site_is_refused(orders: Site, headers: dict[str, str]) -> None:
    answer = orders.client().write("/queues/orders/pause", headers=headers)
    assert (answer.status, answer.problem) == (403, "wrong-origin")
    assert not orders.post.stats("orders").paused


def test_a_write_by_our_own_page_is_let_through(orders: Site) -> None:
    answer = orders.client().write("/queues/orders/pause", headers={"origin": "http://localhost"})
    assert answer.status == 200


def test_over_tls_a_page_without_it_is_another_site(orders: Site) -> None:
    client = orders.client()
    client.scheme = "https"
    assert client.write("/queues/orders/pause", headers={"origin": "http://localhost"}).problem == "wrong-origin"
    assert client.write("/queues/orders/pause", headers={"origin": "https://localhost"}).status == 200


def test_without_a_secret_only_this_machine_is_served(orders: Site) -> None:
    client = orders.client()
    client.address = "192.0.2.7"
    answer = client.get("/api/v1/stores")
    assert (answer.status, answer.problem) == (403, "local-only")
    client.address = "::ffff:127.0.0.1"
    assert client.get("/api/v1/stores").status == 200


@pytest.mark.parametrize("options", [{"hosts": ["ops.example.com"]}, {"trusted_proxies": ["10.0.0.1"]}])
def test_an_app_for_other_machines_must_have_a_secret(orders: Site, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="secret"):
        create_app(orders.served, **options)


def test_every_answer_has_the_security_headers(orders: Site) -> None:
    client = orders.client()
    for path in ("/api/v1/stores", "/api/v1/none", "/api/v1/stores/other/queues"):
        answer = client.get(path)
        policy = answer.header("content-security-policy")
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("cache-control") == "no-store"
        assert answer.header("cross-origin-resource-policy") == "same-origin"


# ---- secrets and sessions ------------------------------------------------------------------------------------------


def test_a_secret_is_wanted_and_a_wrong_one_is_refused(orders: Site) -> None:
    client = orders.client(secret=SECRET)
    answer = client.get("/api/v1/stores")
    assert (answer.status, answer.problem) == (401, "not-signed-in")
    assert client.get("/api/v1/stores", headers=bearer("x" * 20)).problem == "wrong-secret"
    assert client.get("/api/v1/stores", headers=bearer(SECRET)).status == 200


def test_every_operation_wants_its_scope(orders: Site) -> None:
    """A route that forgets to ask would answer."""
    client = orders.client(secret=SECRET, tokens=[READER])
    paths = [("GET", ROOT + read.path) for read in READS] + [("GET", f"{ROOT}/openapi.json")]
    writes = [(action.method, ROOT + STORE + action.path) for action in ACTIONS.values()]
    for method, path in [*paths, *writes]:
        place = path.replace(":path", "").format(store="main", queue="orders", id="0" * 24, name="x")
        assert client.send(method, place).problem == "not-signed-in", path
    for method, path in writes:
        place = path.replace(":path", "").format(store="main", queue="orders", id="0" * 24, name="x")
        assert client.send(method, place, headers=bearer(READER.secret)).problem == "missing-scope", path


def test_wrong_secrets_are_throttled_by_address(orders: Site) -> None:
    client = orders.client(secret=SECRET)
    for _ in range(FAILURES_MAX):
        assert client.get("/api/v1/stores", headers=bearer("wrong" * 4)).status == 401
    throttled = client.get("/api/v1/stores", headers=bearer(SECRET))
    assert (throttled.status, throttled.problem) == (429, "throttled")
    assert 0 < int(throttled.header("retry-after")) <= 60
    client.address = "192.0.2.8"
    assert client.get("/api/v1/stores", headers=bearer(SECRET)).status == 200


def test_the_head_of_the_sign_in_page_is_no_wrong_secret(orders: Site) -> None:
    client = orders.client(secret=SECRET)
    for _ in range(FAILURES_MAX + 1):
        assert client.send("HEAD", "/sign-in").status == 200
    assert client.get("/api/v1/stores", headers=bearer(SECRET)).status == 200


def test_a_throttle_ends_and_counts_a_network_of_version_6_as_one() -> None:
    clock = ManualClock()
    access = Access([Token("one", SECRET)], None, clock=lambda: clock() / 1000)
    for number in range(FAILURES_MAX):
        with pytest.raises(Problem, match="not known"):
            access.sign_in("wrong", f"2001:db8::{number}")
    with pytest.raises(Problem, match="too many"):
        access.sign_in(SECRET, "2001:db8::ffff")
    access.sign_in(SECRET, "2001:db8:0:1::1")
    clock.advance(61)
    assert access.sign_in(SECRET, "2001:db8::ffff")[0].name == "one"


def request_with(cookie: str) -> Request:
    headers = [(b"cookie", f"waypost_session={cookie}".encode())]
    return Request({"type": "http", "headers": headers, "client": ("192.0.2.1", 1), "method": "GET", "path": "/"})


def find_caller(site: Site, access: Access, cookie: str) -> Caller | None:
    return site.runner.run(access.caller_of(request_with(cookie)))


def test_a_session_ends_by_time_by_sign_out_and_with_its_token(memory: Site) -> None:
    clock = ManualClock()
    tokens = [Token("one", SECRET), READER]
    access = Access(tokens, None, clock=lambda: clock() / 1000)
    _, cookie = access.sign_in(SECRET, "192.0.2.1")
    caller = find_caller(memory, access, cookie)
    assert caller is not None
    assert (caller.user.name, caller.via) == ("one", "session")
    # Another process with the same secrets accepts it; one with others does not.
    assert find_caller(memory, Access(tokens, None, clock=lambda: clock() / 1000), cookie) is not None
    assert find_caller(memory, Access([READER], None, clock=lambda: clock() / 1000), cookie) is None
    memory.runner.run(access.sign_out(cookie))
    assert find_caller(memory, access, cookie) is None
    _, cookie = access.sign_in(SECRET, "192.0.2.1")
    clock.advance(SESSION_SECONDS + 1)
    assert find_caller(memory, access, cookie) is None


def test_a_changed_session_cookie_is_worth_nothing(memory: Site) -> None:
    access = Access([Token("one", SECRET)], None)
    _, cookie = access.sign_in(SECRET, "192.0.2.1")
    content, _, signature = cookie.partition(".")
    for changed in ("", ".", "a.b", f"{content}.", f".{signature}", f"{content[:-1]}.{signature}", cookie + "A", "é.é"):
        assert find_caller(memory, access, changed.encode("ascii", "replace").decode()) is None


def test_short_secrets_unknown_scopes_and_equal_names_are_refused() -> None:
    for build in (
        lambda: Token("one", "short"),
        lambda: Token("one", SECRET, frozenset(("root",))),
        lambda: Token("one", SECRET, frozenset()),
        lambda: Token("a|b", SECRET),
        lambda: Access([Token("one", SECRET), Token("one", SECRET + "2")], None),
    ):
        with pytest.raises(ConfigurationError):
            build()


def test_a_token_does_not_show_its_secret() -> None:
    assert SECRET not in repr(Token("one", SECRET))


# ---- CSRF ----------------------------------------------------------------------------------------------------------


def test_a_write_without_the_csrf_token_of_this_browser_is_refused(orders: Site) -> None:
    client = orders.client()
    path = "/api/v1/stores/main/queues/orders/pause"
    assert client.send("POST", path).problem == "csrf"
    other = Client(client.app, client.runner)
    stolen = other.get("/api/v1/session").json()["csrf_token"]
    assert client.send("POST", path, headers={"x-csrf-token": stolen}).problem == "csrf"
    client.get("/api/v1/session")
    assert client.send("POST", path, headers={"x-csrf-token": stolen}).problem == "csrf"
    own = client.get("/api/v1/session").json()["csrf_token"]
    assert client.send("POST", path, headers={"x-csrf-token": own}).status == 200


def test_a_bearer_token_needs_no_csrf_token(orders: Site) -> None:
    client = orders.client(secret=SECRET)
    path = "/api/v1/stores/main/queues/orders/pause"
    assert client.send("POST", path, headers=bearer(SECRET)).status == 200


def test_cookies_are_not_for_scripts_nor_other_sites_and_only_for_tls_behind_it(orders: Site) -> None:
    client = orders.client()
    cookie = client.get("/api/v1/session").header("set-cookie").lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert "secure" not in cookie
    client.cookies.clear()
    client.scheme = "https"
    assert "secure" in client.get("/api/v1/session").header("set-cookie").lower()


# ---- scopes --------------------------------------------------------------------------------------------------------


def test_scopes_include_the_lower_ones_and_bodies_are_apart(orders: Site) -> None:
    client = orders.client(tokens=[READER, OPERATOR, VIEWER])
    path = "/api/v1/stores/main/queues/orders/messages"
    hidden = client.get(path, headers=bearer(OPERATOR.secret)).json()["messages"][0]
    assert (hidden["body"]["form"], hidden["body"]["text"], hidden["headers"]) == ("hidden", None, None)
    served = client.get(path, headers=bearer(VIEWER.secret)).json()["messages"][0]
    assert (served["body"]["text"], served["headers"]) == ('{"card":"4111"}', {"authorization": "token"})
    detail = f"{path}/{hidden['id']}"
    assert "4111" not in client.get(detail, headers=bearer(READER.secret)).text
    pause = "/api/v1/stores/main/queues/orders/pause"
    assert client.send("POST", pause, headers=bearer(READER.secret)).problem == "missing-scope"
    assert client.send("POST", pause, headers=bearer(OPERATOR.secret)).status == 200
    settings = "/api/v1/stores/main/queues/orders/settings"
    assert client.send("PATCH", settings, headers=bearer(OPERATOR.secret)).problem == "missing-scope"


def test_no_user_can_read_bodies_of_hidden_queues(orders: Site) -> None:
    client = orders.client(hide_bodies=["ord*"])
    (message,) = client.api("/queues/orders/messages")["messages"]
    assert (message["body"]["form"], message["headers"]) == ("hidden", None)


def test_a_queue_can_hide_its_bodies_from_every_user(site: Site) -> None:
    site.post.configure("cards", hide_bodies=True, completed=10)
    kept = site.post.publish("cards", {"card": "4111"}, headers={"authorization": "token"}, correlation_id="c-1")
    site.post.publish("plain", {"card": "4111"})
    client = site.client()
    (message,) = client.api("/queues/cards/messages")["messages"]
    assert (message["body"]["form"], message["headers"], message["correlation_id"]) == ("hidden", None, None)
    with site.post.receive("cards") as received:
        assert received is not None
        received.keep_result({"card": "4111"})
    for path in (f"/queues/cards/messages/{kept.id}", "/queues/cards/messages?state=done"):
        assert client.get(f"/api/v1/stores/main{path}").status == 200
        assert "4111" not in client.get(f"/api/v1/stores/main{path}").text
        assert "4111" not in client.get(f"/s/main{path.split('/messages?')[0]}").text
    assert client.api(f"/queues/cards/messages/{kept.id}")["result"]["form"] == "hidden"
    saved = site.post.save_schedule("nightly", queue="cards", every=3600, body={"card": "4111"})
    assert "4111" not in client.get("/s/main/do/save_schedule", queue="cards", key=saved.key).text
    site.post.save_schedule("nightly", queue="plain", every=3600, key="n", body={"card": "4111"})
    assert "4111" in client.get("/s/main/do/save_schedule", queue="plain", key="n").text
    assert "4111" in client.get("/api/v1/stores/main/queues/plain/messages").text
    assert client.write("/queues/cards/settings", {"hide_bodies": False}, method="PATCH").status == 200
    assert "4111" in client.get("/api/v1/stores/main/queues/cards/messages?state=done").text


def test_a_read_only_server_refuses_every_write(orders: Site) -> None:
    client = orders.client(read_only=True)
    assert client.get("/api/v1/session").json()["scopes"] == ["read", "bodies"]
    for action in ACTIONS.values():
        path = (ROOT + STORE + action.path).format(store="main", queue="orders")
        assert client.send(action.method, path).problem == "read-only"


def test_an_application_recognises_users_by_its_own_means(orders: Site) -> None:
    async def auth(request: Request) -> User | None:
        name = request.headers.get("x-test-user")
        return None if name is None else User(name, frozenset(("operate",)))

    client = orders.client(auth=auth, hosts=["ops.example.com"])
    client.host, client.address = "ops.example.com", "192.0.2.7"
    assert client.get("/api/v1/stores").problem == "not-signed-in"
    client.headers["x-test-user"] = "mara"
    assert client.get("/api/v1/session").json()["user"] == "mara"
    assert client.write("/queues/orders/pause").status == 200


# ---- proxies -------------------------------------------------------------------------------------------------------


def test_the_header_of_a_user_counts_only_from_a_trusted_proxy(orders: Site) -> None:
    client = orders.client(auth=header_auth("X-Remote-User", ["read"]), trusted_proxies=["10.0.0.0/8"])
    client.headers["x-remote-user"] = "mara"
    assert client.get("/api/v1/stores").problem == "not-signed-in"
    client.address = "10.1.2.3"
    assert client.get("/api/v1/session").json()["user"] == "mara"
    assert client.get("/api/v1/session").json()["scopes"] == ["read"]


def test_forwarded_headers_count_only_from_a_trusted_proxy(orders: Site) -> None:
    forwarded = {
        "x-forwarded-host": "ops.example.com", "x-forwarded-proto": "https", "x-forwarded-for": "127.0.0.1, 10.0.0.9",
    }  # fmt: skip
    client = orders.client()
    client.address = "192.0.2.7"
    assert client.get("/api/v1/stores", headers=forwarded).problem == "local-only"
    client = orders.client(secret=SECRET, hosts=["ops.example.com"], trusted_proxies=["10.0.0.0/8"])
    client.address, client.host = "10.0.0.1", "inner"
    assert client.get("/api/v1/stores", headers=bearer(SECRET)).problem == "wrong-host"
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | forwarded).status == 200
    # The throttle counts the client behind the proxy, not the proxy.
    for _ in range(FAILURES_MAX):
        client.get("/api/v1/stores", headers=bearer("wrong" * 4) | forwarded)
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | forwarded).problem == "throttled"
    elsewhere = forwarded | {"x-forwarded-for": "198.51.100.1"}
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | elsewhere).status == 200


def test_a_client_cannot_name_its_address_before_the_header_that_a_proxy_adds(orders: Site) -> None:
    client = orders.client(secret=SECRET, trusted_proxies=["10.0.0.0/8"])
    client.address = "10.0.0.1"
    for number in range(FAILURES_MAX):
        forwarded = {"x-forwarded-for": f"198.51.100.{number}\n203.0.113.9"}
        client.get("/api/v1/stores", headers=bearer("wrong" * 4) | forwarded)
    again = {"x-forwarded-for": "198.51.100.99\n203.0.113.9"}
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | again).problem == "throttled"
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | {"x-forwarded-for": "203.0.113.8"}).status == 200


@pytest.mark.parametrize("form", ["203.0.113.9:{}", "[2001:db8::9]:{}", "203.0.113.9, 10.0.0.7:{}"])
def test_wrong_secrets_are_throttled_by_address_if_the_proxy_names_the_port_too(orders: Site, form: str) -> None:
    client = orders.client(secret=SECRET, trusted_proxies=["10.0.0.0/8"])
    client.address = "10.0.0.1"
    for port in range(FAILURES_MAX):
        client.get("/api/v1/stores", headers=bearer("wrong" * 4) | {"x-forwarded-for": form.format(port)})
    again = {"x-forwarded-for": form.format(443)}
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | again).problem == "throttled"
    bare = {"x-forwarded-for": "2001:db8:1::9"}
    assert client.get("/api/v1/stores", headers=bearer(SECRET) | bare).status == 200


def test_a_user_that_is_named_twice_is_no_user(orders: Site) -> None:
    client = orders.client(auth=header_auth("X-Remote-User", ["read"]), trusted_proxies=["10.0.0.0/8"])
    client.address = "10.1.2.3"
    assert client.get("/api/v1/stores", headers={"x-remote-user": "root\nmara"}).problem == "not-signed-in"


@pytest.mark.parametrize(
    "header", ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"]
)
def test_without_a_secret_a_request_through_a_proxy_of_this_machine_is_refused(orders: Site, header: str) -> None:
    client = orders.client()
    assert client.get("/api/v1/stores").status == 200
    refused = client.get("/api/v1/stores", headers={header: "198.51.100.1"})
    assert (refused.status, refused.problem) == (403, "proxied")
    assert header in refused.text
    assert client.get("/s/main", headers={header: "198.51.100.1"}).status == 403
    signed = orders.client(secret=SECRET)
    assert signed.get("/api/v1/stores", headers=bearer(SECRET) | {header: "127.0.0.1"}).status in (200, 421)


def test_a_proxy_that_is_no_address_is_refused(orders: Site) -> None:
    with pytest.raises(ConfigurationError, match="trusted proxy"):
        create_app(orders.served, secret=SECRET, trusted_proxies=["not an address"])


# ---- what is logged ------------------------------------------------------------------------------------------------


def test_every_write_is_logged_with_who_made_it(orders: Site, caplog: pytest.LogCaptureFixture) -> None:
    client = orders.client(tokens=[OPERATOR, READER])
    with caplog.at_level(logging.INFO, "waypost.web"):
        client.send("POST", "/api/v1/stores/main/queues/orders/pause", headers=bearer(OPERATOR.secret))
        client.send(
            "POST", "/api/v1/stores/main/queues/orders/cancel", b'{"id":"0"}',
            headers=bearer(OPERATOR.secret) | {"content-type": "application/json"},
        )  # fmt: skip
    records: list[Any] = [one for one in caplog.records if getattr(one, "event", "") == "web_action"]
    assert [(one.user, one.action, one.queue, one.store) for one in records] == [
        ("operate", "pause", "orders", "main"), ("operate", "cancel", "orders", "main"),
    ]  # fmt: skip
    assert records[0].outcome == "orders is paused"
    assert OPERATOR.secret not in caplog.text


def test_a_password_in_the_url_of_a_store_is_on_no_page(memory: Site) -> None:
    client = Client(create_app({"one": "valkey://user:canary-secret@127.0.0.1:1/0"}), memory.runner)
    for path in ("/api/v1/stores", "/api/v1/stores/one/health", "/api/v1/stores/one/queues"):
        answer = client.get(path)
        assert "canary" not in answer.text
    assert client.get("/api/v1/stores/one/queues").status == 503


@pytest.mark.parametrize("stores", [{}, {"a/b": "memory://"}, {"": "memory://"}, {"one": 7}])
def test_stores_without_a_usable_name_are_refused(stores: Any) -> None:
    with pytest.raises(ConfigurationError):
        create_app(stores)


def test_the_log_of_actions_has_no_body_of_a_schedule(memory: Site) -> None:
    client = memory.client()
    body = {"name": "nightly", "queue": "cards", "every": 3600, "body": {"card": "4111"}}
    assert client.write("/schedules", body, method="PUT").status == 200
    (entry,) = client.api("/actions")["actions"]
    assert "4111" not in str(entry)
    assert entry["command"].endswith("--body BODY")
    assert entry["python"].endswith("body=body)")
