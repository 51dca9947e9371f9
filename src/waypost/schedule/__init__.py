"""Schedules: cron patterns, intervals, time zones and missed fires (pure), and the loops that fire and promote."""
