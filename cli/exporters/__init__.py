"""Formats of other programs. `slipstream show` writes that of `perfetto`."""
