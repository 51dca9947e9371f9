"""PostgreSQL (14 and newer): one SQL function per verb, no shared hot row, safe next to the user's own tables."""

from waypost.store.postgres.migrating import finish, finish_sql, migrate, undo
from waypost.store.postgres.schema import grants, sql
from waypost.store.postgres.schema_check import check, drift
from waypost.store.postgres.store import PostgresStore

__all__ = ["PostgresStore", "check", "drift", "finish", "finish_sql", "grants", "migrate", "sql", "undo"]
