"""The tests share the machine with each other: one thread each."""

import torch

torch.set_num_threads(1)
