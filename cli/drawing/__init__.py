"""Drawings of schedules and figures as text, pictures, pages and traces."""
