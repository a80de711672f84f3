"""Programs around training.

    profile      measures a model's stages on this machine
    measurer     one of the processes by which it does
    stage_bench  a stage under test
    self_test    whether two processes of this machine can train together
    reference    the same training in one plain process, to compare with
"""
