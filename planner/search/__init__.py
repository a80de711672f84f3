"""Searches for the best solution of a problem within a budget.

    engine            candidates are ordered, the promising ones improved, the best one proven
    incumbent         a candidate: its pieces, the best solution of each so far, the bound; where candidates come from
    improvement       how candidates are improved
    list_search       many list schedules: a shortlist and a grid of dispatch rules, random steps from the best
    list_scheduler    one list schedule, by one dispatch rule, of one assignment; what others run: 1F1B, ReCycle
    annealing         simulated annealing of orders and hosts
    cpsat             the exact model in CP-SAT
"""
