"""Without FastAPI the package says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import waypost

PROGRAM = """
import sys
sys.modules["fastapi"] = None
from waypost.errors import MissingExtra
try:
    import waypost.fastapi
except MissingExtra as error:
    print(error)
"""


@pytest.mark.promise("FACE-4")
def test_a_missing_fastapi_is_named_with_its_extra() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(waypost.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "FastAPI is not installed: pip install 'waypost[fastapi]'\n"
