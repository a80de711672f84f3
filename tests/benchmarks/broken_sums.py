"""For processes of tests to import: their sums of gradients do nothing."""

from slipstream.runtime.replay.session import GenerationSession

GenerationSession.sum_over_sharers = lambda *_: None  # type: ignore[method-assign, assignment]
