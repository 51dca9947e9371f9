"""What every channel does: notifications reach their listeners, through cuts and restarts, over one connection."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.valkey_setups import ClusterSetup, SentinelSetup, client_of
from tests.waiting import until
from tests.wake.conftest import ChannelSetup, Received, served_hub
from waypost.operations import receive
from waypost.operations.flow import drive
from waypost.testing.servers import ValkeyServer
from waypost.wake import hub as hubs
from waypost.wake import sqlite as watching
from waypost.wake.hub import Hub, ThreadHub
from waypost.wake.port import ALL_SLEEPERS, POLL_NOW, Topic
from waypost.wake.sqlite import FileHub, SocketTransport, WatchingTransport


def listen(hub: Hub, topic: Topic, name: str | None = "a", on_notification: Received | None = None) -> Received:
    """Listen to a topic, and wait until the subscription is in force."""
    notes = on_notification or Received()
    listener = hub.listen(topic, name, notes)
    assert until(lambda: listener.working, "the subscription")
    return notes


@pytest.mark.promise("WAKE-1", "WAKE-4")
def test_a_notification_reaches_only_the_listener_it_names(channel: ChannelSetup) -> None:
    here, there = channel.pair()
    named, other = listen(here, channel.topic, "a"), listen(here, channel.topic, "b")
    there.send(channel.topic, ["a"])
    assert named.wait_for("a")
    there.send(channel.topic, ["b"])
    assert other.wait_for("b")
    assert "b" not in named.notifications
    assert "a" not in other.notifications


@pytest.mark.promise("WAKE-1", "WAKE-2")
def test_a_notification_to_all_reaches_every_listener_of_its_topic_and_no_other(channel: ChannelSetup) -> None:
    here, there = channel.pair()
    notes = [listen(here, channel.topic, name) for name in ("a", "b", None)]
    elsewhere = listen(here, channel.topic._replace(queue="billing"), "a")
    there.send(channel.topic, [ALL_SLEEPERS])
    for one in notes:
        assert one.wait_for(ALL_SLEEPERS)
    there.send(channel.topic._replace(queue="billing"), ["a"])
    assert elsewhere.wait_for("a")
    assert ALL_SLEEPERS not in elsewhere.notifications


@pytest.mark.promise("WAKE-1")
def test_a_listener_without_a_name_receives_every_notification_of_its_topic(channel: ChannelSetup) -> None:
    here, there = channel.pair()
    topic = channel.topic._replace(kind="held")
    notes = listen(here, topic, None)
    there.send(topic, ["0123456789", "=abc"])
    assert notes.wait_for("=abc")
    assert [notification for notification in notes.notifications if notification != POLL_NOW] == ["0123456789", "=abc"]


@pytest.mark.promise("STORE-6", "WAKE-4")
def test_namespaces_do_not_receive_each_others_notifications(channel: ChannelSetup) -> None:
    here, there = channel.pair()
    notes = listen(here, channel.topic, "a")
    there.send(channel.topic._replace(namespace="others"), ["a"])
    there.send(channel.topic, [ALL_SLEEPERS])
    assert notes.wait_for(ALL_SLEEPERS)
    assert "a" not in notes.notifications


@pytest.mark.promise("WAKE-4")
@pytest.mark.parametrize("queue", ["q" * 128, "a.b..c.", "a:b:ready", "A-1"])
def test_every_name_of_a_queue_can_be_a_topic(channel: ChannelSetup, queue: str) -> None:
    here, there = channel.pair()
    notes = listen(here, channel.topic._replace(queue=queue), "a")
    there.send(channel.topic._replace(queue=queue), ["a"])
    assert notes.wait_for("a")


@pytest.mark.promise("WAKE-2")
def test_hundreds_of_names_arrive_together(channel: ChannelSetup) -> None:
    here, there = channel.pair()
    names = [f"host-{number}:{'x' * 100}" for number in range(512)]
    first, last = listen(here, channel.topic, names[0]), listen(here, channel.topic, names[-1])
    there.send(channel.topic, names)
    assert first.wait_for(names[0])
    assert last.wait_for(names[-1])


@pytest.mark.promise("WAKE-3")
def test_a_callback_that_fails_harms_no_other(channel: ChannelSetup, caplog: pytest.LogCaptureFixture) -> None:
    here, there = channel.pair()

    def fail(notification: str) -> None:
        raise RuntimeError("not now")

    with caplog.at_level(logging.CRITICAL, "waypost"):
        here.listen(channel.topic, "a", fail)
        notes = listen(here, channel.topic, "a")
        for _ in range(2):
            notes.notifications.clear()
            there.send(channel.topic, ["a"])
            assert notes.wait_for("a")


@pytest.mark.promise("WAKE-3")
def test_one_connection_serves_all_listeners_and_ends_with_the_last(valkey: ValkeyServer, namespace: str) -> None:
    hub = served_hub("valkey", valkey.url)
    with client_of(valkey) as client:

        def connections() -> int:
            return len(client.client_list(_type="pubsub"))

        before = connections()
        assert hub.state == "idle"
        listeners = [hub.listen(Topic(namespace, "ready", f"q{n % 5}"), f"name-{n}", Received()) for n in range(50)]
        assert until(lambda: all(listener.working for listener in listeners))
        assert connections() == before + 1
        for listener in listeners[1:]:
            listener.close()
            listener.close()
        assert connections() == before + 1
        listeners[0].close()
        assert until(lambda: connections() == before, "the end of the connection")
        assert until(lambda: hub.state == "idle", "the end of the thread")
        again = hub.listen(Topic(namespace, "ready", "q0"), "name", Received())
        assert until(lambda: again.working, "the new connection")
        again.close()


@pytest.mark.promise("WAKE-3")
def test_a_cut_connection_is_restored_and_every_listener_polls_once(
    server_channel: ChannelSetup, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = server_channel.pair()
    notes = listen(here, server_channel.topic)
    assert server_channel.proxy is not None
    with caplog.at_level(logging.INFO, "waypost"):
        for _ in range(3):
            notes.notifications.clear()
            server_channel.proxy.cut()
            # Once because it broke, once because it works again.
            assert until(lambda: notes.notifications.count(POLL_NOW) >= 2 and here.state == "working", "the repair")

            def is_received() -> bool:
                # The sender's own connection was cut too; a notification lost with it is not sent again.
                there.send(server_channel.topic, ["a"])
                return "a" in notes.notifications

            assert until(is_received, "a notification after the cut")
    broken = [record for record in caplog.records if record.__dict__.get("event") == "wake_broken"]
    assert len(broken) >= 3


@pytest.mark.promise("WAKE-3")
def test_a_server_that_stays_unreachable_is_logged_once(
    server_channel: ChannelSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hubs, "RETRY_MAX_SECONDS", 0.02)
    monkeypatch.setattr(hubs, "RETRY_FIRST_SECONDS", 0.01)
    assert server_channel.proxy is not None
    server_channel.proxy.refuse()
    tries: list[int] = []
    hub = server_channel.make()
    assert isinstance(hub, ThreadHub)
    make = hub._make
    hub._make = lambda: tries.append(1) or make()  # type: ignore[func-returns-value]
    with caplog.at_level(logging.WARNING, "waypost"):
        listener = hub.listen(server_channel.topic, "a", Received())
        assert until(lambda: len(tries) >= 5, "five tries")
        assert hub.state == "broken"
        assert not listener.working
        assert len([r for r in caplog.records if r.__dict__.get("event") == "wake_broken"]) == 1
        server_channel.proxy.heal()
        assert until(lambda: listener.working, "the repair")
    listener.close()


@pytest.mark.promise("WAKE-3")
@pytest.mark.parametrize("kind", ["valkey", "postgres"])
def test_a_half_open_connection_is_noticed(
    kind: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fault.proxy import Proxy

    monkeypatch.setattr(hubs, "PROBE_SECONDS", 0.1)
    server = request.getfixturevalue(kind)
    with Proxy(server.port) as proxy:
        hub = served_hub(kind, server.url.replace(f":{server.port}", f":{proxy.port}"), timeout=0.5)
        topic = Topic(namespace, "ready", "orders")
        listener = hub.listen(topic, "a", Received())
        assert until(lambda: listener.working)
        proxy.silence()
        assert until(lambda: not listener.working, "the discovery of the silent connection")
        proxy.heal()
        assert until(lambda: listener.working, "the repair")
        listener.close()
        assert until(lambda: hub.state == "idle")


@pytest.mark.promise("WAKE-3")
def test_notifications_are_sent_before_a_client_closes(channel: ChannelSetup) -> None:
    here, there = channel.pair()
    notes = listen(here, channel.topic)
    there.send(channel.topic, ["a"])
    assert there.flush(10)
    assert notes.wait_for("a")


@pytest.mark.promise("WAKE-4", "STORE-1")
def test_notifications_pass_through_every_node_of_a_cluster(namespace: str) -> None:
    with ClusterSetup() as setup:
        topic = Topic(namespace, "ready", "orders")
        hub = served_hub("valkey", setup.url)
        notes = listen(hub, topic)
        for server in setup.servers:
            notes.notifications.clear()
            with client_of(server) as client:
                client.publish(f"{{{namespace}:orders}}:ready", "a")
            assert notes.wait_for("a")
        there = served_hub("valkey", setup.url)
        notes.notifications.clear()
        there.send(topic, ["a"])
        assert notes.wait_for("a")
        hub.stop()
        there.stop()


@pytest.mark.promise("WAKE-4", "STORE-1")
def test_notifications_arrive_again_after_a_failover(namespace: str) -> None:
    with SentinelSetup() as setup:
        topic = Topic(namespace, "ready", "orders")
        hub = served_hub("valkey", setup.url)
        notes = listen(hub, topic)
        setup.fail_over()
        assert until(lambda: hub.state == "working" and POLL_NOW in notes.notifications, "the repair")
        with client_of(setup.primary) as client:

            def is_received() -> bool:
                client.publish(f"{{{namespace}:orders}}:ready", "a")
                return "a" in notes.notifications

            assert until(is_received, "a notification from the new primary")
        hub.stop()


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_notifications_pass_between_processes_that_share_a_file(folder: Path, namespace: str) -> None:
    path = folder / "orders.db"
    hub = FileHub(str(path))
    notes = listen(hub, Topic(namespace, "ready", "orders"))
    script = (
        "import sys; from waypost.wake.sqlite import FileHub; from waypost.wake.port import Topic; "
        f"FileHub({str(path)!r}).send(Topic({namespace!r}, 'ready', 'orders'), ['a'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert notes.wait_for("a")
    hub.stop()


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_sockets_of_killed_processes_are_removed(folder: Path, namespace: str) -> None:
    path = folder / "orders.db"
    script = (
        "import os, time; from waypost.wake.sqlite import FileHub; from waypost.wake.port import Topic\n"
        f"hub = FileHub({str(path)!r}); listener = hub.listen(Topic({namespace!r}, 'ready', 'orders'), 'a', print)\n"
        "while not listener.working: time.sleep(0.001)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    left = Path(f"{path}-wake")
    assert len(list(left.iterdir())) == 1
    FileHub(str(path)).send(Topic(namespace, "ready", "orders"), ["a"])
    assert list(left.iterdir()) == []


def transport_of(hub: FileHub, namespace: str) -> object:
    """Return the transport of a hub once it listens."""
    notes = listen(hub, Topic(namespace, "ready", "orders"))
    assert notes is not None
    return hub._transport


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_files_and_sockets_behind_a_planted_link_are_left_alone(folder: Path, namespace: str) -> None:
    path, target = folder / "orders.db", folder / "target"
    sqlite3.connect(path).close()
    target.mkdir()
    (target / "letter").write_text("dear")
    (target / "0123456789abcdef").write_text("named like one of ours")
    left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.bind(str(target / "fedcba9876543210"))
    left.close()
    Path(f"{path}-wake").symlink_to(target)
    hub = FileHub(str(path))
    assert isinstance(transport_of(hub, namespace), WatchingTransport)
    hub.send(Topic(namespace, "ready", "orders"), ["a"])
    hub.stop()
    assert len(list(target.iterdir())) == 3


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_files_that_are_not_our_sockets_stay_in_the_directory(folder: Path, namespace: str) -> None:
    path = folder / "orders.db"
    hub = FileHub(str(path))
    listen(hub, Topic(namespace, "ready", "orders"))
    beside = Path(f"{path}-wake")
    assert stat.S_IMODE(beside.stat().st_mode) == 0o700
    (folder / "letter").write_text("dear")
    elsewhere = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    elsewhere.bind(str(folder / "elsewhere"))
    elsewhere.setblocking(False)
    (beside / "00000000000000aa").write_text("a file")
    (beside / "00000000000000bb").symlink_to(folder / "letter")
    (beside / "00000000000000cc").symlink_to(folder / "elsewhere")
    for name in ("named-by-others", "00000000000000dd"):
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        dead.bind(str(beside / name))
        dead.close()
    FileHub(str(path)).send(Topic(namespace, "ready", "orders"), ["a"])
    left = {one.name for one in beside.iterdir()}
    assert {"00000000000000aa", "00000000000000bb", "00000000000000cc", "named-by-others"} <= left
    assert "00000000000000dd" not in left
    assert (folder / "letter").read_text() == "dear"
    with pytest.raises(BlockingIOError):
        elsewhere.recv(100)
    elsewhere.close()
    hub.stop()


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_processes_with_the_same_pid_listen_side_by_side(folder: Path, namespace: str) -> None:
    """As in containers that share a volume, where each is process 1."""
    path = folder / "orders.db"
    script = (
        "import os, sys; os.getpid = lambda: 1\n"
        "from waypost.wake.sqlite import FileHub; from waypost.wake.port import Topic\n"
        "def write(notification):\n"
        "    if notification: print(notification, flush=True)\n"
        f"hub = FileHub({str(path)!r}); listener = hub.listen(Topic({namespace!r}, 'ready', 'orders'), 'a', write)\n"
        "while not listener.working: pass\n"
        "print('listening', flush=True); sys.stdin.read()"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "12"
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listening\n"
    assert len(list(Path(f"{path}-wake").iterdir())) == 2
    FileHub(str(path)).send(Topic(namespace, "ready", "orders"), ["a"])
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == b"a\n"
        assert other.communicate(b"", timeout=30)[0] == b""


@pytest.mark.promise("WAKE-4", "STORE-3")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_is_not_used(folder: Path, namespace: str, mode: int) -> None:
    path = folder / "orders.db"
    sqlite3.connect(path).close()
    path.chmod(0o644)
    Path(f"{path}-wake").mkdir()
    Path(f"{path}-wake").chmod(mode)
    hub = FileHub(str(path))
    assert isinstance(transport_of(hub, namespace), WatchingTransport)
    hub.stop()
    assert list(Path(f"{path}-wake").iterdir()) == []


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_a_group_that_may_write_the_file_shares_its_directory(folder: Path, namespace: str) -> None:
    path = folder / "orders.db"
    sqlite3.connect(path).close()
    path.chmod(0o660)
    Path(f"{path}-wake").mkdir()
    Path(f"{path}-wake").chmod(0o770)
    hub = FileHub(str(path))
    assert isinstance(transport_of(hub, namespace), SocketTransport)
    hub.stop()


@pytest.mark.promise("WAKE-4", "STORE-3")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_not_used(folder: Path, namespace: str) -> None:
    path = folder / "orders.db"
    sqlite3.connect(path).close()
    Path(f"{path}-wake").mkdir(0o755)
    os.chown(f"{path}-wake", 12345, 12345)
    hub = FileHub(str(path))
    assert isinstance(transport_of(hub, namespace), WatchingTransport)
    hub.stop()


@pytest.mark.promise("WAKE-4", "STORE-3")
def test_where_the_path_is_too_long_for_a_socket_the_file_itself_is_watched(folder: Path, namespace: str) -> None:
    from waypost import Waypost

    path = folder / ("x" * 80) / "orders.db"
    path.parent.mkdir()
    with Waypost(f"sqlite:///{path}", namespace=namespace) as post:
        hub = post.wakeups.channel
        assert isinstance(hub, FileHub)
        post.policy("orders")
        notes = listen(hub, Topic(namespace, "ready", "orders"), "sleepy")
        assert until(lambda: POLL_NOW in notes.notifications)
        assert isinstance(hub._transport, WatchingTransport)
        drive(post._connected(), receive.claim(post._context, "orders", 1, sleeper="sleepy"))
        notes.notifications.clear()
        post.publish("orders", 1)
        assert notes.wait_for("sleepy")
        hub.stop()


@pytest.mark.promise("WAKE-4", "CRON-7")
def test_schedulers_of_a_file_that_is_watched_read_after_a_write(
    folder: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waypost import Waypost

    monkeypatch.setattr(watching, "SCHEDULES_SECONDS", 0.01)
    path = folder / ("x" * 80) / "orders.db"
    path.parent.mkdir()
    with Waypost(f"sqlite:///{path}", namespace=namespace) as post:
        hub = post.wakeups.channel
        assert isinstance(hub, FileHub)
        post.policy("orders")
        notes = listen(hub, Topic(namespace, "schedules", "*"), None)
        assert until(lambda: POLL_NOW in notes.notifications)
        assert isinstance(hub._transport, WatchingTransport)
        for every in (60, 90):
            notes.notifications.clear()
            post.save_schedule("rollup", queue="reports", every=every)
            assert notes.wait_for(POLL_NOW)
        hub.stop()
