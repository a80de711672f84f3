"""Builders of schedule tables, which `schedules.tables` reads.

build           plans every entry, in parallel processes
taking_over     shorter plans of other entries that answer the same failures
folder          the folder of a table during its build: finished entries, one file each
process_pool    processes for long tasks, which end when one dies or the caller stops,
                or executors of MPI or Dask
"""
