"""Errors that end a command with one sentence, never with a traceback."""

from __future__ import annotations


class SimctlError(Exception):
    """Bad input: what is wrong, where (file, line, key) and what would be right. Exit code 2."""


class CalibrationError(SimctlError):
    """A calibration cannot go on: no usable GPU, a leaking partition, a failed reference check."""


class PlanError(Exception):
    """A policy returned a plan that cannot be carried out; the policy is at fault, not the user's input."""


class StalledError(Exception):
    """Nothing can progress although requests wait; carries the diagnosis."""
