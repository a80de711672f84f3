"""Planning of schedules concurrently with the event loop.

schedule_finder      finds the schedules that decisions request
precomputed_plans    plans schedules for likely failures before they happen
background           runs planning in forked processes or in threads
"""
