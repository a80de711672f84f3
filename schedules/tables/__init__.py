"""Tables of schedules: one for each number of failures, looked up without a solver.

    pattern        failure sets that are equal up to symmetry, and their keys
    file           the files of a table, read with their digests verified
    entry_codec    schedules to entries and back
    relabel        fits a schedule to the workers that have really failed
    moves          what workers must load for the roles that they play
    spread         has holders of a stage on different machines where roles move
    table          loads a table, and looks up a schedule
"""
