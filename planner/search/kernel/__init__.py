"""Inner loops compiled to machine code by numba; `planner.search.compiled` says whether they are ready."""
