"""A queue with a cap: publishers are refused, or wait, or the oldest is dropped. All clients share the limits."""

import threading

from waypost import Waypost
from waypost.errors import QueueFull

with Waypost("sqlite:///work.db") as post:
    post.configure("strict", max_pending=3)
    post.publish_many("strict", [1, 2, 3])
    try:
        post.publish("strict", 4)
    except QueueFull as full:
        print("refused:", full)

    post.configure("sensors", max_pending=3, overload="drop_oldest")
    post.publish_many("sensors", [20.1, 20.2, 20.3])
    post.publish("sensors", 20.4)
    print("kept:", [message.body for message in post.peek("sensors")])

    # The producer waits while a consumer in another thread makes room.
    post.configure("patient", max_pending=2, overload="block")

    def consume() -> None:
        for _ in range(6):
            with post.receive("patient", wait=5) as message:
                if message is not None:
                    print("handled", message.body)

    consumer = threading.Thread(target=consume)
    consumer.start()
    for number in range(6):
        post.publish("patient", number, block_timeout=5)
    consumer.join()

    # At most five deliveries in any minute, over all workers: a sixth receive within it comes back empty.
    post.configure("mails", rate="5/m")
    post.publish_many("mails", range(8))
    sent = 0
    for _ in range(8):
        with post.receive("mails") as message:
            sent += message is not None
    print(f"{sent} of 8 mails at once, the rest at 5 a minute")
