"""Runs of the real coordinator and the real workers in one process.

Time is virtual, and the transport scripted.
"""
