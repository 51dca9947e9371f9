"""The recipes of docs/how-to/test-your-code.md pass as they are, in a project of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("FACE-7")

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"^```python file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = """
SECRET_KEY = "of a test"
INSTALLED_APPS = ["waypost.django", "shop_project"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
WAYPOST = {"DATABASE": "default", "QUEUES": {"orders": {"max_deliveries": 7}}}
USE_TZ = True
"""
#: A test in addition to those of the page.
QUEUES_TEST = """
from django.test import SimpleTestCase
from waypost.django.testing import use_test_post


class QueuesTests(SimpleTestCase):
    def test_queues_have_their_settings(self):
        with use_test_post() as test:
            self.assertEqual(test.policy("orders").max_deliveries, 7)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """All files of the page."""
    found = FILE.findall((ROOT / "docs" / "how-to" / "test-your-code.md").read_text())
    assert len(found) == 7
    for name, text in found:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(project)])
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=project, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_recipes_for_pytest_and_fastapi_pass(project: Path) -> None:
    ran = run(
        project, "pytest", "-q", "-p", "pytest_waypost", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed" in ran.stdout


def test_the_recipe_for_django_passes(project: Path) -> None:
    (project / "shop_settings.py").write_text(SETTINGS)
    (project / "shop_project" / "__init__.py").write_text("")
    (project / "shop_project" / "test_queues.py").write_text(QUEUES_TEST)
    ran = run(project, "django", "test", "--settings=shop_settings")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 3 tests" in ran.stderr
