"""An order service in FastAPI: orders and messages in one transaction, with a worker, a timer and a schedule inside.

As a service: SHOP_URL=postgresql://localhost/shop uvicorn fastapi_orders:app
On PostgreSQL `waypost migrate postgresql://localhost/shop` creates the tables of waypost first.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from waypost import Constant, Waypost
from waypost.fastapi import Publisher, WaypostLifespan, background_task, publisher

URL = os.environ.get("SHOP_URL", "sqlite:///shop.db")
MINUTES_TO_PAY = 30

engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))
post = Waypost(URL)


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """One order."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    address: Mapped[str]
    amount: Mapped[int]
    state: Mapped[str] = mapped_column(default="open")


class NewOrder(BaseModel):
    """What is posted to /orders."""

    address: str
    amount: int


# ---- messages ----------------------------------------------------------------------------------------------


@post.handler("charges", engine=engine, retry=Constant(attempts=3, pause=0.05, jitter=0))
def charge(order_id: int, session: Session) -> None:
    """Charge an order. Its new state and the end of the message are committed together."""
    order = session.get_one(Order, order_id)
    order.state = "paid"


@post.handler("expiries", engine=engine)
def expire(order_id: int, session: Session) -> None:
    """Close an order that was not paid in time."""
    order = session.get_one(Order, order_id)
    if order.state == "open":
        order.state = "expired"


@background_task(post)
def send_receipt(order_id: int, address: str) -> None:
    """Runs after the response, in a worker; also if this process is killed before."""
    print(f"mail to {address}: order {order_id} is being charged")


@post.cron("0 6 * * *", tz="Europe/Madrid", missed="once", handler={"engine": engine})
def report(session: Session) -> None:
    """Every morning at six, once, however many processes run."""
    print("report:", session.scalar(select(func.count()).where(Order.state == "paid")), "paid")


# ---- the service -------------------------------------------------------------------------------------------


def open_session() -> Iterator[Session]:
    """One transaction for each request, rolled back if it fails."""
    with Session(engine) as session, session.begin():
        yield session


#: In scope `function` the commit comes before the response, so that no client is sent what was not stored.
RequestSession = Annotated[Session, Depends(open_session, scope="function")]
Publish = Annotated[Publisher, Depends(publisher(post, RequestSession))]


async def create_tables(app: FastAPI) -> AsyncIterator[None]:
    Base.metadata.create_all(engine)
    yield
    engine.dispose()


waypost = WaypostLifespan(post, create_tables)
app = FastAPI(lifespan=waypost)
app.include_router(waypost.health_routes(), prefix="/health")


@app.post("/orders", status_code=201)
def create_order(new: NewOrder, session: RequestSession, publish: Publish) -> int:
    order = Order(address=new.address, amount=new.amount)
    session.add(order)
    session.flush()  # gives it its id
    publish("expiries", order.id, key=f"order:{order.id}", delay=MINUTES_TO_PAY * 60)
    if order.amount <= 0:
        raise HTTPException(422, "an order costs something")  # neither the order nor the timer exists
    return order.id


@app.post("/orders/{order_id}/payment", status_code=202)
def pay(order_id: int, session: RequestSession, publish: Publish) -> str:
    order = session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    publish("charges", order_id, key=f"order:{order_id}")
    publish.add_task(send_receipt, order_id, address=order.address)
    return publish.cancel("expiries", key=f"order:{order_id}")


@app.get("/orders/{order_id}")
def read_order(order_id: int, session: RequestSession) -> str:
    order = session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return order.state


# ---- a customer --------------------------------------------------------------------------------------------


async def handled(queue: str) -> None:
    """Wait until the message of a queue is done."""
    ledger = post.ledger(queue)
    while not ledger.done:
        await asyncio.sleep(0.02)
        ledger = post.ledger(queue)


async def main() -> None:
    from httpx import ASGITransport, AsyncClient

    logging.getLogger("waypost").setLevel(logging.ERROR)
    transport = ASGITransport(app=app)
    async with app.router.lifespan_context(app), AsyncClient(transport=transport, base_url="http://shop") as client:
        print("ready:", (await client.get("/health/ready")).json()["ok"])
        order = {"address": "ann@example.com", "amount": 10}
        first = (await client.post("/orders", json=order)).json()
        second = (await client.post("/orders", json=order)).json()
        print("refused:", (await client.post("/orders", json={**order, "amount": 0})).status_code)
        print("timers:", [timer.key for timer in post.timers("expiries")])
        print("payment:", (await client.post(f"/orders/{first}/payment")).json())
        await handled("charges")
        await handled("background.send_receipt")
        post.trigger_schedule("report")  # as the clock does at six
        await handled("report")
        for number in (first, second):
            print(f"order {number}:", (await client.get(f"/orders/{number}")).json())
        print("timers:", [timer.key for timer in post.timers("expiries")])


if __name__ == "__main__":
    asyncio.run(main())
