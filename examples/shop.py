"""A first worker: a handler, and a program that publishes. `waypost worker shop` runs the handler."""

from waypost import Waypost

post = Waypost("sqlite:///shop.db")


@post.handler("orders")
def charge(order: dict[str, int]) -> None:
    print("charging order", order["id"])


if __name__ == "__main__":
    published = post.publish("orders", {"id": 7}, key="order:7")
    print("order 7 is", published.status)
    post.close()
