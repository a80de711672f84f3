"""Deal the unlike samples of an iteration to the micro-batches of a schedule.

A schedule names its micro-batches (pipeline, index) and plans all of them as equal. If the cost of
each sample of an iteration is known, samples are assigned to names such that the unchanged schedule
ends early: it is replayed with these costs, and swaps of two samples that shorten it are kept. The
search starts by balancing the totals of pipelines (WLB-LLM, arXiv 2503.17924). Beyond that, the
order matters, and which samples other workers run for a failed worker.
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
