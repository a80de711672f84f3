"""Inner loops compiled to machine code by numba; `planner.compiled` says whether they are ready."""
