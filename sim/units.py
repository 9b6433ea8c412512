"""Unit factors. Inside the program everything is seconds, tokens and bytes."""

from __future__ import annotations

MS = 1e-3
US = 1e-6
KIB = 1024
MIB = 1024**2
GIB = 1024**3
