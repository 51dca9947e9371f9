"""A handler that fails: retried after a pause, then a dead letter, then repaired and sent again."""

from waypost import Constant, Dead, Waypost

RETRY = Constant(pause=0.05, jitter=0, attempts=3)


def charge(order: dict[str, int], *, repaired: bool) -> None:
    if order["amount"] < 0:
        raise Dead("negative amount")
    if not repaired:
        raise ConnectionError("the payment service is away")
    print("  charged")


def work(post: Waypost, *, repaired: bool = False) -> None:
    """Handle what comes until nothing has come for a moment."""
    working = True
    while working:
        try:
            with post.receive("orders", wait=0.3, retry=RETRY) as message:
                working = message is not None
                if message is not None:
                    print(f"order {message.body['id']}, attempt {message.attempts + 1}")
                    charge(message.body, repaired=repaired)
        except ConnectionError as error:
            # The message is settled by then: it comes back after the pause, or it is dead.
            print(f"  failed: {error}")


with Waypost("sqlite:///orders.db") as post:
    post.publish_many("orders", [{"id": 1, "amount": 5}, {"id": 2, "amount": -5}])
    work(post)
    for letter in post.dead_letters("orders"):
        print(f"dead: order {letter.body['id']}, {letter.reason}, {letter.error or 'no error'}")

    moved = post.redrive("orders", reason="retries_exhausted").moved
    print(f"{len(moved)} sent again")
    work(post, repaired=True)
    ledger = post.ledger("orders")
    print(f"{ledger.done} done, {ledger.dead_kept} dead, balance {ledger.balance}")
