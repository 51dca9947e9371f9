"""Checks of `manage.py check`: whether the setting WAYPOST makes sense."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error, register

from waypost.django.configuration import read_configuration
from waypost.errors import WaypostError


def register_checks() -> None:
    """Register the checks with Django."""
    register(check_configuration)


def check_configuration(**_: Any) -> list[CheckMessage]:
    """Report a setting WAYPOST that cannot be used."""
    try:
        read_configuration()
    except WaypostError as error:
        return [Error(str(error), hint="See the setting WAYPOST in waypost's page on Django.", id="waypost.E001")]
    return []
