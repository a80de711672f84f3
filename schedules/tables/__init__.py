"""Tables of schedules: one for each number of failures, looked up without a solver.

    pattern        failure sets that are equal up to symmetry, and their keys
    file           the files of a table, read with their digests verified; schedules to entries and back
    relabel        fits a schedule to the workers that have really failed
    table          loads a table, and looks up a schedule
"""
