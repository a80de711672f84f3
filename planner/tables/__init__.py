"""Builds tables of schedules; `schedules.tables` reads them.

    build           plans every entry, in parallel processes
    folder          the folder of a table that is being built: finished entries, one file each
    process_pool    processes for long tasks, which end when one dies or the caller stops
    executors       those of MPI and Dask instead, on many machines
"""
