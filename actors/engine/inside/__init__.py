"""What also runs inside the processes of an inference server: torch and the standard library, nothing of Sluice's.

`launch.py` loads this package by path, in an interpreter that need not have Sluice.
"""
