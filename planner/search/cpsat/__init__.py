"""The exact model of the scheduling problem in OR-Tools CP-SAT.

    variables      decision variables
    constraints    the rules, one method each
    model          improves a plan, or finds a shorter one from scratch
    finder         the latter in a thread, beside annealing
"""
