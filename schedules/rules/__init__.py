"""The rules of a schedule, one function each; `schedules.check` lists them.

    case         the schedule under check, and what several rules look up in it
    workers      who works, and who holds which layers
    programs     what each worker runs
    times        where and when
"""
