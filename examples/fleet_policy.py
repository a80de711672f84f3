"""A policy in its own package: whole pipelines, and a pause for each loss.

Its package names it in pyproject.toml; `python -m benchmarks.fleet --entry whole-pipelines`
simulates it beside ours:

    [project.entry-points."slipstream.policies"]
    whole-pipelines = "my_package.fleet_policy:WholePipelines"
"""

from slipstream.planner.simulation import Entry


class WholePipelines(Entry):
    """Workers of broken pipelines form whole ones; every change costs half a minute."""

    name = "whole-pipelines"
    title = "whole pipelines under 1F1B"
    source = "an example"
    assumptions = "workers take any stage in 30 s; the global batch is kept"

    def rate(self, down):
        """Return samples per second with `down` workers down, a number for each stage."""
        live = self.scenario.workers - sum(down)
        return self.throughputs.one_f_one_b_rate(live // self.scenario.stages)

    def pause(self, down):  # noqa: ARG002
        """Return for how many seconds nothing is trained when workers die or return."""
        return 30.0
