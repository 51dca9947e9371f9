"""Schedules: cron patterns, intervals, time zones and missed fires (no I/O), and the loops that fire and promote."""
