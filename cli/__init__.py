"""Commands of the `slipstream` program, a module each, and what they share.

shared/     input, output and options of several commands
drawing/    schedules, runs and simulations as text, SVG and pages (`page/` has templates and
            scripts)
figures/    what `slipstream reproduce` computes again
exporters/  formats of other programs
jobs/       jobs that commands run by themselves
"""
