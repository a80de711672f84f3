"""Programs for use before, or in comparison with, training.

profile      measures a model's stages on this machine
measurer     one of the processes that measure
stage_bench  a stage under measurement
self_test    a test that two processes of this machine can train together
reference    the same training in one plain process, for comparison
"""
