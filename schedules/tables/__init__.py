"""Read tables of schedules, and look schedules up without a solver.

pattern    sets of failures that are equal up to symmetry, and keys of entries
file       files of a table, read with their digests verified; converts schedules and entries
relabel    fits a schedule to the workers that have failed
table      loads a table, and looks up a schedule
"""
