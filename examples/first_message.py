"""A first message: published, received and settled on SQLite, in ten lines."""

from waypost import Waypost

with Waypost("sqlite:///orders.db") as post:
    post.publish("orders", {"id": 7, "item": "lamp"}, key="order:7")
    with post.receive("orders", wait=5) as message:
        if message is not None:
            print("charging order", message.body["id"])
    print(post.ledger("orders").done, "done")
