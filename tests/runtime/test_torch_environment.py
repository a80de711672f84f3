"""What torch is told before it is imported, unless the user has said something else."""

import os
import runpy

import pytest

from slipstream import runtime

ALLOCATOR = "PYTORCH_ALLOC_CONF"
OLDER = "PYTORCH_CUDA_ALLOC_CONF"
"""The older name of the same variable."""


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, {ALLOCATOR: "expandable_segments:True"}),
        ({ALLOCATOR: "max_split_size_mb:64"}, {ALLOCATOR: "max_split_size_mb:64"}),
        ({OLDER: "max_split_size_mb:64"}, {OLDER: "max_split_size_mb:64"}),
    ],
)
def test_memory_can_grow_unless_the_user_says_how_it_is_allocated(environment, found, monkeypatch):
    monkeypatch.setattr(os, "environ", environment)
    runpy.run_path(runtime.__file__)
    assert {
        name: value for name, value in os.environ.items() if name in {ALLOCATOR, OLDER}
    } == found
