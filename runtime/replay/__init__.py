"""How a schedule is run: ops in program order, and the tensors that pass between workers."""
