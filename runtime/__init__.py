"""Replays schedules with torch: one process per worker."""
