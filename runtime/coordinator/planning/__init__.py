"""Planning beside the event loop.

    schedule_finder      finds the schedules that decisions ask for
    precomputed_plans    finds those for the failures that may come next, before these come
    background           does that in processes that are forked, or in threads
"""
