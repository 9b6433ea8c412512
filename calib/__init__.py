"""Calibration on a real GPU. Imports torch and cupy lazily; nothing here is needed to simulate."""
