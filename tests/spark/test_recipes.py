"""The recipes of the page about the pipeline: their SQL and Python as they are printed, without dbt and Airflow."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import duckdb
import jinja2
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.spark.lakes import live, plant
from tests.spark.shop import Shop
from waypost.cli.main import main
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import GOLD_MINUTES, SILVER_OPEN_MESSAGES, TABLES

pytestmark = pytest.mark.xdist_group("spark")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "pipeline.md"
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def recipe(kind: str, text: str) -> str:
    """Return the one block of the page that has this text."""
    (found,) = [
        block["text"] for block in BLOCK.finditer(PAGE.read_text()) if block["kind"] == kind and text in block[0]
    ]
    return found


@pytest.mark.promise("SPARK-4")
def test_messages_now_is_the_same_in_spark_duckdb_and_polars(
    orders: Shop, pipeline: Callable[..., Pipeline], spark: SparkSession, tmp_path: Path
) -> None:
    made = pipeline(orders, "lake")
    for _ in range(2):
        live(orders, 20)
        made.run()
    lake, columns = made.lake, ("queue", "message_id", "state", "published_ms", "claimed")
    wanted = Counter(tuple(row[name] for name in columns) for row in lake.messages_now(spark).collect())
    assert len({row[2] for row in wanted}) > 2
    view, chosen = recipe("sql", "VIEW messages_now"), f"SELECT {', '.join(columns)} FROM messages_now"
    lake.frame(spark, SILVER_OPEN_MESSAGES).createOrReplaceTempView("open_messages")
    try:
        spark.sql(view)
        assert Counter(tuple(row) for row in spark.sql(chosen).collect()) == wanted
    finally:
        spark.catalog.dropTempView("messages_now")
        spark.catalog.dropTempView("open_messages")
    with duckdb.connect() as connection:
        path = lake.files.path(SILVER_OPEN_MESSAGES.name)
        connection.register("open_messages", DeltaTable(path).to_pyarrow_dataset())
        connection.execute(view)
        assert Counter(connection.execute(chosen).fetchall()) == wanted
    program = tmp_path / "recipe.py"
    text = recipe("python", "ended_number").replace('"lake/', f'"{tmp_path}/lake/')
    program.write_text(f"import polars\n{text}")
    now = runpy.run_path(str(program))["now"]
    assert Counter(now.select(columns).rows()) == wanted


@pytest.mark.promise("SPARK-4")
def test_the_model_for_dbt_runs_on_the_tables_that_its_sources_name(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    """The package is not installed: its template is rendered as dbt does; the plugin reads what `DeltaTable` reads."""
    live(orders, 30)
    made = pipeline(orders, "lake")
    made.run()
    pattern = r'- name: (\w+)\n +meta: \{delta_table_path: "/lake/([\w/]+)"\}'
    sources = dict(re.findall(pattern, recipe("yaml", "delta_table_path")))
    assert len(sources) == 2
    assert set(sources.values()) <= {table.name for table in TABLES}
    template = jinja2.Environment(autoescape=False).from_string(recipe("sql", "models/daily.sql"))
    settings: dict[str, str] = {}

    def configure(**given: str) -> str:
        settings.update(given)
        return ""

    query = template.render(config=configure, source=lambda schema, table: f'"{schema}_{table}"')
    assert settings == {"materialized": "table"}
    with duckdb.connect() as connection:
        for name, folder in sources.items():
            found = DeltaTable(str(tmp_path / "lake" / folder)).to_pyarrow_dataset()
            connection.register(f"waypost_{name}", found)
        rows = connection.execute(f"SELECT queue, published, dead, run_ms FROM ({query})").fetchall()
    minutes = made.lake.rows(GOLD_MINUTES).to_pylist()
    total = {name: sum(row[name] for row in minutes) for name in ("published", "dead", "run_ms_sum", "run_count")}
    assert sum(row[1] for row in rows) == total["published"] > 0
    assert sum(row[2] for row in rows) == total["dead"] > 0
    assert {row[0] for row in rows} == {"orders"}


class Dag:
    """In place of Airflow's own."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name, self.settings = name, settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


class BashOperator:
    """In place of Airflow's own: keeps its command."""

    def __init__(self, *, task_id: str, bash_command: str, **settings: Any) -> None:
        self.task_id, self.command, self.settings = task_id, bash_command, settings

    def __rshift__(self, other: BashOperator) -> BashOperator:
        return other


@pytest.mark.promise("SPARK-4")
@pytest.mark.usefixtures("running_session")
def test_the_command_for_airflow_loads_each_interval_once(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Airflow is not installed: stand-ins take its commands, and this test renders their templates and runs them."""
    for name, members in (
        ("airflow.providers.standard.operators.bash", {"BashOperator": BashOperator}),
        ("airflow.sdk", {"DAG": Dag}),
    ):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    program = tmp_path / "dag.py"
    program.write_text(recipe("python", "BashOperator").replace("/lake ", f"{tmp_path}/lake "))
    made = runpy.run_path(str(program))
    template = jinja2.Environment(autoescape=False).from_string(made["run"].command)
    monkeypatch.setenv("WAYPOST_URL", orders.url)
    hour = timedelta(hours=1)
    start = datetime(2026, 3, 1, tzinfo=UTC)
    for number in range(3):
        orders.post.publish_many("orders", range(10))
        at = int((start + number * hour).timestamp() * 1000)
        plant(orders, "UPDATE wp_journal SET at_ms = ? + number WHERE number > ?", at, number * 10)

    def run(interval: int) -> int:
        command = shlex.split(template.render(data_interval_end=start + (interval + 1) * hour))
        assert command[:3] == ["waypost", "pipeline", "run"]
        assert main(command[1:]) == 0
        return int(json.loads(capsys.readouterr().out)["events_added"])

    # The second task is tried again, and the first one too, late.
    assert [run(interval) for interval in (0, 1, 1, 0, 2)] == [10, 10, 0, 0, 10]
    assert sum(seen.events for seen in Lake(str(tmp_path / "lake")).state.seen.values()) == 30
    assert made["models"].command.startswith("dbt build")
