"""Read tables of schedules, and look schedules up without a solver.

pattern    failure sets that are equal up to symmetry, and their keys
file       files of a table, read with their digests verified; converts schedules and entries
relabel    fits a schedule to the workers that have failed
table      loads a table, and looks up a schedule
"""
