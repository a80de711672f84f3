"""Recompute published figures, one module each: `python -m benchmarks.figures NAME`."""
