"""Published figures, computed again, one module each: `python -m benchmarks.figures NAME`."""
