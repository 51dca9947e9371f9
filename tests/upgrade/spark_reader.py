"""Reads stores with Spark, in the release that is first on the path, and prints what it read as one line of JSON.

    python spark_reader.py URL NAMESPACE [URL NAMESPACE ...]

It uses only names that every release has, because releases side by side run it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from waypost.release import VERSION
from waypost.spark.session import session

#: What is read of each kind; all of it is in the store, whichever release wrote it.
COLUMNS = {
    "journal": ("number", "event", "message_id", "key", "cause", "at_ms"),
    "messages": ("id", "key", "content_type", "text", "number"),
    "ready": ("id", "key", "content_type", "text", "token"),
    "dead": ("id", "key", "content_type", "text", "token"),
}


def main() -> None:
    places = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    for number, (url, _) in enumerate(places):
        # A URL with a password is refused as an option, which Spark shows in plans and logs.
        os.environ[f"STORE_{number}"] = url
    spark = session("local[1]", {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
    read: list[dict[str, Any]] = []
    for number, (_, namespace) in enumerate(places):
        rows = {}
        place = {"urlEnv": f"STORE_{number}", "namespace": namespace, "queue": "orders"}
        for kind, columns in COLUMNS.items():
            source = spark.read.format("waypost").options(**place, kind=kind)
            found = source.load().select(*columns).collect()
            rows[kind] = sorted((list(row) for row in found), key=lambda row: row[0])
        read.append(rows)
    spark.stop()
    print(json.dumps({"release": VERSION, "read": read}))


if __name__ == "__main__":
    main()
