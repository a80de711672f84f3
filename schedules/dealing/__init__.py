"""Assign samples of unequal length to the micro-batches of a fixed schedule.

A schedule plans all micro-batches as equal. Real samples differ, and each micro-batch gets one
sample. If the cost of each sample of an iteration is known, samples are dealt to the micro-batches
such that the schedule, itself unchanged, ends early.

The search starts by giving pipelines about equal work (WLB-LLM, arXiv 2503.17924). It then swaps
pairs of samples, replays the schedule with their costs, and keeps the swaps that shorten it, or do
not delay its workers at equal length. The work of pipelines is not all that counts: the order of
samples does, too, and which samples other workers run for a failed worker.

    deal       chooses a sample for each micro-batch
    lengths    costs of samples, from the lengths of their documents
    arrays     the steps of a schedule as arrays
    kernel     compiled loops over these arrays (`compiled` compiles them at installation)
"""

from slipstream.schedules.dealing.deal import CostError, Costs, Dealer, Dealt, require_costs
from slipstream.schedules.dealing.lengths import (
    CoefficientFit,
    Coefficients,
    costs_by_stage,
    costs_of,
    fit_coefficients,
    read_lengths,
)

__all__ = [
    "CoefficientFit",
    "Coefficients",
    "CostError",
    "Costs",
    "Dealer",
    "Dealt",
    "costs_by_stage",
    "costs_of",
    "fit_coefficients",
    "read_lengths",
    "require_costs",
]
