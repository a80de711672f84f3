"""Schedules and figures as text, pictures, pages and traces."""
