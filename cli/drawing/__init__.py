"""Drawings of schedules and figures as text, pictures and pages."""
