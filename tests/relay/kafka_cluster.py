"""The mock cluster of librdkafka in a process of its own: it speaks Kafka's protocol, and can be frozen as a whole.

    python -m tests.relay.kafka_cluster

Prints its address in one line, and ends when its input does.
"""

from __future__ import annotations

import sys

from confluent_kafka import Producer


def main() -> None:
    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    brokers = producer.list_topics(timeout=10).brokers.values()
    sys.stdout.write(",".join(f"{broker.host}:{broker.port}" for broker in brokers) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
