"""This release and a build with a planted change in every layer, side by side on each store, and back."""

from __future__ import annotations

import pytest

from tests.fault.release_figures import release_figures
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace


@pytest.mark.timeout(600)
@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("store", ["sqlite", "valkey", "postgres"])
def test_two_releases_work_side_by_side(store: str, request: pytest.FixtureRequest) -> None:
    namespace = fresh_namespace()
    if store == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('tmp_path') / 'store.db'}"
    else:
        url = str(request.getfixturevalue(f"{store}_url"))
    if store == "postgres":
        migrate(url, namespace=namespace)
    figures = list(release_figures(url, namespace, quick=True, timed=False))
    assert [str(figure) for figure in figures if not figure.ok] == []
    assert len(figures) == 10
