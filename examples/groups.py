"""Groups: a noisy customer does not delay a quiet one, an account keeps its order, limits hold for each group alone."""

from collections import Counter
from contextlib import ExitStack

from waypost import Retry, Waypost


def noisy_before_quiet(post: Waypost, queue: str) -> int:
    """How many messages of the noisy customer are handled before the five of the quiet one are."""
    post.publish_many(queue, range(500), group="noisy")
    post.publish_many(queue, range(5), group="quiet")
    handled: Counter[str | None] = Counter()
    while handled["quiet"] < 5:
        with post.receive(queue) as message:
            if message is not None:
                handled[message.group] += 1
    return handled["noisy"]


with Waypost("sqlite:///groups.db") as post:
    print(f"by age: {noisy_before_quiet(post, 'mails')} noisy messages before the quiet customer is served")
    post.configure("mails-in-turns", fair=True)
    print(f"in turns: {noisy_before_quiet(post, 'mails-in-turns')} noisy messages before the quiet customer is served")

    # One at a time within an account and in order, also when one has to be tried again. Other accounts go on.
    post.configure("accounts", order="group")
    post.publish_many("accounts", ["open", "deposit", "close"], group="ann")
    post.publish_many("accounts", ["open", "close"], group="bob")
    for _ in range(6):
        with post.receive("accounts", wait=5) as message:
            if message is not None and message.body == "deposit" and message.attempts == 0:
                print("ann: deposit, to be tried again")
                raise Retry(0.2)
            if message is not None:
                print(f"{message.group}: {message.body}")

    # At most two calls for each customer at a time, over all workers; gold customers may have four.
    post.configure("calls", group_max_running=2)
    post.configure_group("calls", "gold", max_running=4)
    post.publish_many("calls", range(10), group="gold")
    post.publish_many("calls", range(10), group="silver")
    with ExitStack() as stack:
        received = [stack.enter_context(post.receive("calls")) for _ in range(20)]
        running = Counter(message.group for message in received if message is not None)
    print(f"running at once: {running['gold']} gold, {running['silver']} silver")
