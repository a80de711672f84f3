"""Replays schedules with torch: one process per worker."""

import os

# torchft reads this when it is imported, and would otherwise tell of every request on stderr.
os.environ.setdefault("RUST_LOG", "warn")
