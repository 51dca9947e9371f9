"""Bodies of every type of Spark: published as `to_json` writes them, and read back by `from_json` as they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import MapType, StringType, StructType

from tests.spark.shop import Shop
from waypost.spark.spark_errors import map_spark_error

pytestmark = pytest.mark.xdist_group("spark")
#: A value of each type, as SQL.
VALUES = {
    "boolean": "true",
    "tinyint": "tinyint(-7)",
    "smallint": "smallint(700)",
    "int": "2147483647",
    "bigint": "9223372036854775807L",
    "float": "float(0.1)",
    "double": "1.5e300D",
    "decimal": "12345678901234567890.123456789012345678BD",
    "decimal_zeros": "CAST(1.10 AS DECIMAL(10, 2))",
    "decimal_small": "CAST(0.0000000001 AS DECIMAL(20, 18))",
    "string": "'ü — 見た \"quoted\" \\\\ \\n'",
    "binary": "X'00ff10'",
    "date": "DATE'2026-03-01'",
    "timestamp": "TIMESTAMP'2026-03-01T12:00:00.123456Z'",
    "timestamp_ntz": "TIMESTAMP_NTZ'2026-03-01T12:00:00.123456'",
    "time": "TIME'12:34:56.123456'",
    "day_time": "INTERVAL '-1 02:03:04.5' DAY TO SECOND",
    "hour": "INTERVAL '30' HOUR",
    "array": "array(1, NULL, 3)",
    "map": "map('b', map('x', 1.5BD), 'a', NULL)",
    "struct": "named_struct('x', 1, 'y', map('k', array(named_struct('z', 0.5D))))",
}
#: Keys of maps that are no text, and the text that they become, as in `to_json`.
KEYS = {"1": "1", "true": "true", "1.50BD": "1.50", "2.5D": "2.5", "float(0.1)": "0.1", "'a'": "a"}


def publish(spark: SparkSession, shop: Shop, expression: str, **options: str) -> str:
    """Publish one row, and return its body as text."""
    rows = spark.sql(f"SELECT {expression} AS body")
    rows.write.format("waypost").mode("append").options(**shop.options, queue="out", **options).save()
    (message,) = shop.stored("ready", "out")
    shop.post.purge("out", "ready")
    return message.envelope[message.envelope.index(b"\0\0\0\0") + 4 :].decode()


@pytest.fixture
def time_type(spark: SparkSession) -> Iterator[None]:
    """The type TIME, which is off by default."""
    spark.conf.set("spark.sql.timeType.enabled", "true")
    yield
    spark.conf.unset("spark.sql.timeType.enabled")


@pytest.mark.promise("SPARK-1")
@pytest.mark.usefixtures("time_type")
def test_a_body_of_every_type_is_what_to_json_writes_and_is_read_back_by_from_json(
    spark: SparkSession, orders: Shop
) -> None:
    """Each type by itself, in an array, as the value of a map, and as null."""
    shapes = ("{0}", "array({0}, NULL)", "map('k', {0}, 'null', NULL)", "nullif({0}, {0})")
    fields = ", ".join(
        f"'{name}_{number}', {shape.format(value)}"
        for name, value in VALUES.items()
        for number, shape in enumerate(shapes)
        if not (number == 3 and name in ("map", "struct"))
    )
    whole = f"named_struct({fields})"
    text = publish(spark, orders, whole)
    rows = spark.sql(f"SELECT {whole} AS body")
    given = rows.collect()[0].body
    options = {"ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
               "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}  # fmt: skip
    wanted = rows.select(f.to_json("body", options)).collect()[0][0]
    numbers: dict[str, Any] = {"parse_float": str.upper}  # every digit counts, but 1e5 is 1E5
    assert json.loads(text, **numbers) == json.loads(wanted, **numbers)
    kind = cast("StructType", rows.schema["body"].dataType)
    parsed = spark.createDataFrame([(text,)], "text STRING").select(f.from_json("text", kind).alias("body"))
    assert parsed.collect()[0].body == given


@pytest.mark.promise("SPARK-1")
def test_maps_and_variants_are_objects_at_the_top_too(spark: SparkSession, orders: Shop) -> None:
    assert publish(spark, orders, "map('b', 1.50BD, 'a', NULL)") == '{"b":1.50,"a":null}'
    assert publish(spark, orders, "named_struct('v', parse_json('{\"a\": [1, 2.50]}'))") == '{"v":{"a":[1,2.50]}}'
    keys = ", ".join(f"'{number}', map({key}, 1)" for number, key in enumerate(KEYS))
    found = json.loads(publish(spark, orders, f"named_struct({keys})"))
    assert [next(iter(part)) for part in found.values()] == list(KEYS.values())
    wanted = spark.sql(f"SELECT to_json(named_struct({keys}))").collect()[0][0]
    assert found == json.loads(wanted)
    kind = StructType().add("a", MapType(StringType(), StringType()))
    assert kind.simpleString() == "struct<a:map<string,string>>"


@pytest.mark.promise("SPARK-1")
def test_a_write_that_is_refused_runs_each_task_once_and_gives_the_reason_in_one_sentence(
    spark: SparkSession, orders: Shop, tmp_path: Any
) -> None:
    tried = tmp_path / "tried"

    def note(number: int) -> float:
        with tried.open("a") as file:
            file.write(f"{number}\n")
        return float("nan") if number == 3 else 1.0

    rows = spark.range(0, 4, 1, 1).select(
        f.struct(f.udf(note, "double", useArrow=False)("id").alias("total")).alias("body"),
        f.concat(f.lit("order:"), f.col("id")).alias("key"),
    )
    out = rows.write.format("waypost").mode("append").options(**orders.options, queue="out")
    with pytest.raises(PySparkException) as raised:
        out.save()
    sentence = (
        "partition 0, row 3 (the first is 0), key 'order:3': body.total is NaN or infinity, which JSON does not have: "
        "set the option nan to null or string"
    )
    assert sentence in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert str(map_spark_error(raised.value)) == sentence
    assert tried.read_text().split() == ["0", "1", "2", "3"]
    out.options(onInvalid="divert", invalidPath=str(tmp_path / "aside"), countsPath=str(tmp_path / "counts")).save()
    (counts,) = (tmp_path / "counts").iterdir()
    assert json.loads(counts.read_text())["counts"] == {"diverted": 1, "queued": 3}
    (aside,) = spark.read.parquet(str(tmp_path / "aside")).collect()
    assert (aside.key, aside.row, aside.partition) == ("order:3", 3, 0)


def test_an_unknown_option_is_refused_in_one_sentence(spark: SparkSession, orders: Shop) -> None:
    with pytest.raises(PySparkException) as raised:
        spark.range(1).select(f.struct("id").alias("body")).write.format("waypost").mode("append").options(
            **orders.options, queue="out", mood="good"
        ).save()
    assert "unknown options: mood" in str(raised.value)
    assert "Traceback" not in str(raised.value)
