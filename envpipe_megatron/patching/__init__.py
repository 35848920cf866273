"""Patches for checkouts of training frameworks: found, applied, proven live, and taken back.

`checkout` applies and reverts by `git apply`, in forks too, and keeps what a user has edited beside
the patch; `liveness` asks whether the hooks are called. `cli/jobs/patch.py` calls both.
"""
