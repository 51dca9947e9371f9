"""`waypost doctor`: problems are reported with what to do, and a healthy store gives exit code 0."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from msgspec import structs

from tests.cli.conftest import CommandRunner
from tests.servers.valkey_setups import ClusterSetup
from waypost import Waypost
from waypost.cli.doctor_checks import check_store, queues
from waypost.cli.doctor_checks.workers import check_served, check_workers
from waypost.cli.main import main
from waypost.store.checkup import Finding
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.postgres import checkup as postgres
from waypost.store.postgres import migrate
from waypost.store.postgres.schema import VERSION
from waypost.store.sqlite import checkup as sqlite_checkup
from waypost.store.valkey import checkup as valkey
from waypost.testing.bench import fresh_namespace, strand
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import RedisServer, ValkeyServer

pytestmark = pytest.mark.promise("FACE-2", "STORE-1")


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str], clean: None) -> Any:
    """Run doctor, and return its exit code and its findings by check."""

    def run(url: str, namespace: str = "wp") -> tuple[int, dict[str, list[dict[str, Any]]]]:
        code = main(["doctor", url, "--namespace", namespace, "--json"])
        printed: dict[str, list[dict[str, Any]]] = {}
        for finding in json.loads(capsys.readouterr().out)["findings"]:
            printed.setdefault(finding["check"], []).append(finding)
        return code, printed

    return run


def level(printed: dict[str, list[dict[str, Any]]], check: str) -> list[str]:
    return [finding["level"] for finding in printed[check]]


# ---- a healthy store ----------------------------------------------------------------------------------------


def test_a_healthy_store_gives_exit_code_0_and_its_bytes_per_message(examined: Any, tmp_path: Path) -> None:
    with (
        ValkeyServer(appendonly=True, appendfsync="always", maxmemory="256mb") as cache,
        PostgresServer(durable=True, autovacuum="on") as database,
    ):
        migrate(database.url)
        for url in (cache.url, database.url, f"sqlite:///{tmp_path / 'a.db'}"):
            with Waypost(url) as post:
                post.publish_many("orders", [{"id": number} for number in range(300)], key=lambda body: str(body["id"]),
                                  window=600)  # fmt: skip
                with post.receive("orders") as message:
                    assert message is not None
                    message.keep_result("a result")
                post._call(post.store.heartbeat(Heartbeat("a", queues=(ServedQueue("orders", 10),)), 30_000))
                code, printed = examined(url)
                assert code == 0, printed
                measured = {one["figures"].get("what"): one["figures"].get("bytes_each") for one in printed["bytes"]}
                assert sorted(map(str, measured)) == ["dedup key", "event", "message", "result"]
                assert all(measured.values()), measured
                assert 40 < measured["message"] < 5_000


# ---- Valkey ------------------------------------------------------------------------------------------------------


def test_a_server_that_may_lose_or_evict_messages_is_reported(examined: Any) -> None:
    with ValkeyServer(maxmemory="64mb", maxmemory_policy="allkeys-lru") as server:
        code, printed = examined(server.url)
        assert (code, level(printed, "durability"), level(printed, "eviction")) == (1, ["wrong"], ["wrong"])
        assert printed["durability"][0]["advice"] == "set appendonly yes"
        with redis.Redis(port=server.port, password=server.password) as client:
            client.config_set("appendonly", "yes")
            client.config_set("appendfsync", "everysec")
            client.config_set("maxmemory-policy", "noeviction")
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", int(used * 1.1))
        code, printed = examined(server.url)
        assert (level(printed, "durability"), level(printed, "eviction")) == (["note"], ["ok"])
        assert (code, level(printed, "memory")) == (1, ["wrong"])


@pytest.fixture
def user(valkey_server: ValkeyServer) -> Iterator[Any]:
    """Creates users with few rights, and returns their URL."""
    with redis.Redis(port=valkey_server.port, password=valkey_server.password) as client:

        def make(*rules: str) -> str:
            client.execute_command("ACL", "SETUSER", "clerk", "reset", "on", ">hunter2", *rules)
            return f"valkey://clerk:hunter2@127.0.0.1:{valkey_server.port}"

        yield make
        client.execute_command("ACL", "DELUSER", "clerk")


def test_the_verbs_that_a_user_may_not_use_are_named(user: Any, examined: Any, valkey_server: ValkeyServer) -> None:
    name = fresh_namespace()
    with Waypost(valkey_server.url, namespace=name) as post:
        post.publish("orders", 1)
    keys = (f"~{{{name}:*", f"~{{{name}}}:*", f"~{name}:*", f"&{{{name}:*")
    code, printed = examined(user(*keys, "+@all", "-zadd"), name)
    (finding,) = printed["permissions"]
    assert (code, finding["figures"]["denied"]) == (1, ["ZADD"])
    assert {"publish", "claim", "settle"} <= set(finding["figures"]["verbs"])
    assert "stats" not in finding["figures"]["verbs"]
    _, printed = examined(user(*keys[:3], "+@all", "resetchannels"), name)
    assert printed["permissions"][0]["figures"]["verbs"] == ["wake"]
    _, printed = examined(user(keys[0], *keys[2:], "+@all"), name)
    assert (printed["permissions"][0]["figures"], "workers" in printed) == ({"keys": [f"{{{name}}}:*"]}, False)
    _, printed = examined(user(*keys, "+@all"), name)
    assert level(printed, "permissions") == ["ok"]
    _, printed = examined(user(*keys, "+@all", "-acl", "-memory", "-config"), name)
    assert (level(printed, "permissions"), level(printed, "bytes"), level(printed, "durability")) == (
        ["note"],
        ["note"],
        ["note"],
    )


def test_a_user_without_read_rights_gives_exit_code_3_and_no_secret_is_printed(
    user: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", user("+@all", "~other:*")]) == 3
    printed = capsys.readouterr().out
    assert "WRONG connection: " in printed
    assert "hunter2" not in printed


def test_every_command_that_scripts_use_has_known_key_positions(valkey_server: ValkeyServer) -> None:
    used = {name for names in valkey.verbs().values() for name in names}
    assert len(used) > 30
    with redis.Redis(port=valkey_server.port, password=valkey_server.password) as client:
        for name in sorted(used | set(valkey.OTHER_COMMANDS)):
            answer = client.execute_command("ACL", "DRYRUN", "default", name, *valkey.arguments_of(name, "a", "b"))
            assert answer in (b"OK", "OK", True), f"{name}: {answer}"


def test_an_old_server_and_a_cluster_are_examined_too(examined: Any) -> None:
    with RedisServer(appendonly=True) as server:
        code, printed = examined(server.url)
        assert (code, level(printed, "permissions")) == (0, ["note"])
        assert printed["server"][0]["found"].startswith("Redis 6.2")
    with ClusterSetup(appendonly="yes", appendfsync="always", maxmemory="64mb") as cluster:
        with Waypost(cluster.url) as post:
            for name in ("orders", "mails", "invoices", "rollups"):
                post.publish(name, 1)
        code, printed = examined(cluster.url)
        assert (code, len(printed["server"]), level(printed, "permissions")) == (1, 3, ["ok"] * 3)
        assert {one["figures"]["queue"] for one in printed["handlers"]} == {"orders", "mails", "invoices", "rollups"}
        assert printed["bytes"][0]["figures"]["measured"] == 4


# ---- PostgreSQL --------------------------------------------------------------------------------------------------


def test_tables_that_differ_are_named(postgres_server: PostgresServer, examined: Any) -> None:
    name = fresh_namespace()
    migrate(postgres_server.url, namespace=name)
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f'DROP INDEX "{name}_tally_queue"')
    code, printed = examined(postgres_server.url, name)
    assert code == 1
    assert printed["schema"][0]["found"] == f"index {name}_tally_queue is missing"
    assert "waypost migrate" in printed["schema"][0]["advice"]


@pytest.mark.promise("STORE-7")
def test_an_upgrade_that_is_not_finished_is_noted_in_both_releases(
    postgres_server: PostgresServer, examined: Any
) -> None:
    name = fresh_namespace()
    migrate(postgres_server.url, namespace=name)
    assert "upgrade" not in examined(postgres_server.url, name)[1]
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"INSERT INTO \"{name}_interface\" VALUES ({VERSION - 1}, '{{}}', 0, '')")
        _, printed = examined(postgres_server.url, name)
        assert (level(printed, "upgrade"), level(printed, "schema")) == (["note"], ["ok"])
        assert "--finish" in printed["upgrade"][0]["advice"]
        connection.execute(f'UPDATE "{name}_schema" SET version = {VERSION + 1}')
    _, printed = examined(postgres_server.url, name)
    assert level(printed, "schema") == ["note"]
    assert printed["schema"][0]["figures"] == {"version": VERSION + 1}


def test_missing_grants_of_a_role_are_named(postgres_server: PostgresServer, examined: Any) -> None:
    name, role = fresh_namespace(), f"clerk_{fresh_namespace().replace('-', '_')}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f'CREATE ROLE "{role}" LOGIN')
        migrate(postgres_server.url, namespace=name, grant=role)
        url = postgres_server.socket_url.replace("postgres@", f"{role}@")
        _, printed = examined(url, name)
        assert (level(printed, "permissions"), level(printed, "schema")) == (["ok"], ["ok"])
        connection.execute(f'REVOKE DELETE ON "{name}_message" FROM "{role}"')
        connection.execute("REVOKE TEMPORARY ON DATABASE postgres FROM PUBLIC")
        code, printed = examined(url, name)
        connection.execute("GRANT TEMPORARY ON DATABASE postgres TO PUBLIC")
        assert (code, printed["permissions"][0]["figures"]["lacking"]) == (1, [f"DELETE on {name}_message"])
        assert f"--grant {role}" in printed["permissions"][0]["advice"]
        assert level(printed, "schema") == ["note"]


def test_a_transaction_left_open_is_named_by_its_process(
    postgres_server: PostgresServer, examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fresh_namespace()
    migrate(postgres_server.url, namespace=name)
    monkeypatch.setattr(postgres, "OPEN_SECONDS_MAX", 0)
    with psycopg.connect(postgres_server.url, application_name="forgotten") as connection:
        connection.execute("SELECT pg_current_xact_id()")
        _, printed = examined(postgres_server.url, name)
        mine = [one for one in printed["transactions"] if one["figures"].get("application") == "forgotten"]
        assert [one["figures"]["pid"] for one in mine] == [connection.info.backend_pid]
        assert f"pg_terminate_backend({connection.info.backend_pid})" in mine[0]["advice"]


# ---- SQLite, and checks of all stores -----------------------------------------------------------------------


def test_a_damaged_file_is_found(examined: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with Waypost(url) as post:
        post.publish_many("orders", [b"x" * 4_000] * 200)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with open(tmp_path / "a.db", "r+b") as file:
        file.seek(-200_000, 2)
        file.write(b"\xff" * 100_000)
    code, printed = examined(url)
    assert code in (1, 4)
    assert any("damaged" in one["found"] for findings in printed.values() for one in findings)


def test_a_file_is_read_whole_up_to_a_size(examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    with Waypost(f"sqlite:///{path}") as post:
        post.publish("orders", 1)
    size = path.stat().st_size
    for largest, expected in ((size, "no damage"), (size - 1, "too large to check for damage here")):
        monkeypatch.setattr(sqlite_checkup, "QUICK_CHECK_BYTES_MAX", largest)
        [finding] = examined(f"sqlite:///{path}")[1]["file"]
        assert expected in finding["found"]
        assert finding["figures"]["bytes"] == size


def found(post: Waypost, check: str) -> list[Finding]:
    return [finding for finding in check_store(post) if finding.check == check]


def test_the_log_is_found_beside_the_file_that_a_link_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_checkup, "LOG_BYTES_KEPT", 1)
    (tmp_path / "data").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "data" / "a.db")
    with Waypost(f"sqlite:///{tmp_path / 'link.db'}") as post:
        post.publish("orders", 1)
        [finding] = found(post, "log")
        assert finding.figures["bytes"] == (tmp_path / "data" / "a.db-wal").stat().st_size


def test_a_queue_is_served_by_a_worker_a_sleeper_or_a_lease_holder(cli: CommandRunner) -> None:
    post = cli.post
    for name in ("orders", "mails", "invoices"):
        post.publish(name, 1)
    post._call(post.store.heartbeat(Heartbeat("a", queues=(ServedQueue("orders", 10),)), 30_000))
    with post.receive("mails"):
        stats, workers = [post.stats(name) for name in post.queues()], post.workers()
        lonely = [one.figures["queue"] for one in check_served(stats, workers) if one.level == "wrong"]
    assert lonely == ["invoices"]


def test_unhealthy_workers_lagging_readers_and_dead_letters_are_reported(cli: CommandRunner) -> None:
    post = cli.post
    post._call(
        post.store.heartbeat(Heartbeat("a", version="0.2.0", status="red", reasons=("queue orders: stuck",)), 30_000)
    )
    post._call(post.store.heartbeat(Heartbeat("b", version="0.3.0"), 30_000))
    post.configure("orders", journal_max=100)
    post.journal_reader("orders", "lake")
    cli.bury("orders", *range(20))
    post.pause("orders")
    printed = {finding.check: finding for finding in check_store(post) if finding.level != "ok"}
    assert printed["workers"].found == "worker a is red: queue orders: stuck"
    assert printed["releases"].figures == {"releases": {"0.2.0": 1, "0.3.0": 1}}
    assert (printed["readers"].level, printed["readers"].figures["lag"]) == ("wrong", 62)
    assert printed["dead letters"].figures == {"dead": 20}
    assert printed["paused"].figures == {"queues": ["orders"]}


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize(("other", "advised"), [("0.2.7", "by their patch only"), ("0.3.0", "--finish")])
def test_releases_that_differ_by_a_patch_need_no_end_of_an_upgrade(
    cli: CommandRunner, other: str, advised: str
) -> None:
    for name, version in (("a", "0.2.0"), ("b", other)):
        cli.post._call(cli.post.store.heartbeat(Heartbeat(name, version=version), 30_000))
    (finding,) = [finding for finding in check_workers(cli.post.workers()) if finding.check == "releases"]
    assert advised in str(finding.advice)


def test_a_wrong_clock_and_an_unbalanced_ledger_are_reported() -> None:
    with Waypost("memory://", clock=lambda: round(time.time() * 1000) + 3_600_000) as post:
        post.publish("orders", 1)
        (clock,) = found(post, "clock")
        assert (clock.level, clock.figures["difference_seconds"] > 3_590) == ("note", True)
        stats = post.stats("orders")
    broken = structs.replace(stats, ledger=structs.replace(stats.ledger, published=2))
    (ledger,) = queues.check_ledgers([broken])
    assert (ledger.level, ledger.figures) == ("wrong", {"queues": ["orders"]})


# ---- damaged records -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def damaged_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store with ten messages, one of which no claim can reach."""
    url = f"sqlite:///{tmp_path / 'damaged.db'}"
    with ExitStack() as servers:
        if request.param == "valkey":
            url = servers.enter_context(ValkeyServer(appendonly=True, appendfsync="always", maxmemory="256mb")).url
        elif request.param == "postgres":
            url = servers.enter_context(PostgresServer(durable=True, autovacuum="on")).url
            migrate(url)
        with Waypost(url) as post:
            published = post.publish_many("orders", range(10))
            post._call(post.store.heartbeat(Heartbeat("a", queues=(ServedQueue("orders", 10),)), 30_000))
            post._call(strand(post.store, "orders", published[4].id))
        yield url


@pytest.mark.promise("SEE-5")
def test_a_message_that_no_claim_can_reach_is_found_and_repaired(
    examined: Any, damaged_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = examined(damaged_url)
    assert code == 1
    assert printed["records"][0]["figures"]["kind"] == "stranded"
    stranded = printed["records"][0]["figures"]["id"]
    assert main(["doctor", damaged_url, "--mend"]) == 2, "it was not confirmed"
    assert "--yes" in capsys.readouterr().err
    assert main(["doctor", damaged_url, "--mend", "--yes", "--json"]) == 0
    capsys.readouterr()
    code, printed = examined(damaged_url)
    assert (code, level(printed, "records"), level(printed, "ledger")) == (0, ["ok"], ["ok"])
    with Waypost(damaged_url) as post, post.receive("orders") as message:
        assert message is not None
        assert message.id == stranded


@pytest.mark.promise("STORE-1")
def test_a_queue_missing_from_the_list_is_found_by_its_keys_and_listed_by_a_repair(
    examined: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with ValkeyServer(appendonly=True, appendfsync="always", maxmemory="256mb") as server:
        with Waypost(server.url) as post:
            post.publish_many("orders", range(50))
            post._call(post.store.heartbeat(Heartbeat("a", queues=(ServedQueue("orders", 10),)), 30_000))
        with redis.Redis(port=server.port, password=server.password) as client:
            client.delete("wp:queues")
        code, printed = examined(server.url)
        assert (code, printed["list of queues"][0]["figures"]["queues"]) == (1, ["orders"])
        assert main(["doctor", server.url, "--mend", "--yes", "--quiet"]) == 0
        capsys.readouterr()
        with Waypost(server.url) as post:
            assert post.queues() == ["orders"]


@pytest.mark.promise("SEE-5")
def test_unreadable_counters_are_found_and_counted_again(examined: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with ValkeyServer(appendonly=True, appendfsync="always", maxmemory="256mb") as server:
        with Waypost(server.url) as post:
            post.publish_many("orders", range(5))
            post._call(post.store.heartbeat(Heartbeat("a", queues=(ServedQueue("orders", 10),)), 30_000))
        with redis.Redis(port=server.port, password=server.password) as client:
            client.hset("{wp:orders}:queue", "counts", "\xc1")
        code, printed = examined(server.url)
        assert (code, printed["records"][0]["figures"]["kind"]) == (1, "unreadable")
        assert main(["doctor", server.url, "--mend", "--yes", "--quiet"]) == 0
        capsys.readouterr()
        assert examined(server.url)[0] == 0
