"""Drawings of schedules, runs, simulations and figures as text, pictures and pages."""
