"""Samples dealt to the names of a schedule: an iteration's micro-batches are not alike, and its plan takes them so.

A schedule names its micro-batches (pipeline, index), and plans all as equal. Where it is known what each sample of an
iteration costs, they are given names such that the schedule, as it stands, ends early: it is replayed with these costs,
and swaps of two samples that shorten it are kept. Balancing the totals of pipelines (WLB-LLM, arXiv 2503.17924) is
where that begins; what counts beyond is the order, and which samples go to names that others run for a failed worker.
"""

from slipstream.schedules.dealing.deal import CostError, Costs, Dealer, Dealt, require_costs
from slipstream.schedules.dealing.fit import CoefficientFit, Coefficients, costs_by_stage, fit
from slipstream.schedules.dealing.lengths import costs_of, read_lengths

__all__ = [
           "CoefficientFit",
           "Coefficients",
           "CostError",
           "Costs",
           "Dealer",
           "Dealt",
           "costs_by_stage",
           "costs_of",
           "fit",
           "read_lengths",
           "require_costs",
]
