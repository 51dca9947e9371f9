"""What happened to a message, and where all the others went: history, journal and ledger."""

from waypost import Drop, Retry, Waypost

with Waypost("sqlite:///audit.db") as post:
    published = post.publish("orders", {"id": 7}, key="order:7", group="acme")
    with post.receive("orders"):
        raise Retry(after=0, reason="the warehouse is closed")
    with post.receive("orders"):
        pass  # done

    post.publish_many("orders", [{"id": 8}, {"id": 9}, {"id": 10}])
    with post.receive("orders"):
        raise Drop
    post.cancel("orders", id=next(post.messages("orders")).id)

    print("the history of order 7:")
    for event in post.history("orders", published.id):
        print(f"  {event.number:2d} {event.event:10s} token {event.token}, deliveries {event.deliveries}")

    print("the journal:", " ".join(event.event for event in post.journal("orders").events))
    ledger = post.ledger("orders")
    print(
        f"the ledger: {ledger.published} published = {ledger.ready} ready + {ledger.done} done + "
        f"{ledger.dropped} dropped + {ledger.cancelled} cancelled, balance {ledger.balance}"
    )
    print(f"redelivered: {ledger.redelivered['retried']} after a retry, {ledger.unexplained} unexplained")
