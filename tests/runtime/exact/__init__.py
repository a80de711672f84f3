"""Runs of the real coordinator and the real workers in one process and in virtual time, over a scripted transport."""
