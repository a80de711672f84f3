"""Inner loops compiled to machine code by numba; `planner.search.compiled` says when."""
