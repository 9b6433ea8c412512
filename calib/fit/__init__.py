"""From measurements to a profile: physics forms with fitted terms, residual tables, held-out errors.

`python -m calib.fit RUN -o PROFILE` reads a calibration's folder and writes a profile's.
"""
