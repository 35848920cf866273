"""Patches for checkouts of training frameworks: found, applied, proven live, and taken back.

`checkout` applies and reverts by `git apply`, in forks too, and keeps what a user has edited beside
the patch; `liveness` looks whether the hooks are there. `cli/jobs/patch.py` calls both.
"""
