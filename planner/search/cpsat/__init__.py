"""The exact model of the scheduling problem in OR-Tools CP-SAT.

    variables      decision variables
    constraints    the rules, one method each
    model          improves a plan, and proves how short one can be
"""
