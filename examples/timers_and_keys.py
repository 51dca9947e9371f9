"""Timers, and keys that make a message the only one of its kind: a reminder that is moved, replaced and cancelled."""

from datetime import UTC, datetime, timedelta

from waypost import CONTENT, Waypost

with Waypost("sqlite:///reminders.db") as post:
    # A key stands for one unfinished message: a second publish is a duplicate, unless `on_conflict` is given.
    first = post.publish("reminders", {"text": "call Ann"}, key="ann", delay=timedelta(hours=1))
    again = post.publish("reminders", {"text": "call Ann"}, key="ann", delay=timedelta(hours=1))
    print(first.status, again.status, first.id == again.id)

    # Move it, or replace it as a whole.
    print(post.publish("reminders", {}, key="ann", on_conflict="extend", delay=timedelta(hours=2)).status)
    print(post.publish("reminders", {"text": "write Ann"}, key="ann", on_conflict="replace", delay=0.2).status)

    # Timers may be years away, and are listed by their due time.
    post.publish("reminders", {"text": "retire"}, key="old", at=datetime(2060, 1, 1, tzinfo=UTC))
    print([timer.body["text"] for timer in post.timers("reminders")])

    # A receive that waits is woken by the timer, never before its time.
    with post.receive("reminders", wait=5) as message:
        if message is not None:
            print("now:", message.body["text"])
    print(post.cancel("reminders", key="old"))

    # A message that is worth nothing after some time: if it is not claimed by then, it is never handed out.
    post.publish("quotes", {"price": 7}, expires=datetime.now(UTC) - timedelta(seconds=1))
    post.publish("quotes", {"price": 8}, expires=timedelta(minutes=10))
    with post.receive("quotes", wait=5) as quote:
        if quote is not None:
            print("price:", quote.body["price"], "dropped:", post.ledger("quotes").dropped)

    # The content itself as the key, for a window: the same body within a minute is the same message.
    sent = [post.publish("mails", {"to": "Ann", "n": n % 2}, key=CONTENT, window=60).status for n in range(4)]
    print(sent)
