"""Patches for checkouts of training frameworks: found, applied, proven live, and taken back.

A hunk goes where its old lines stand, if that is one place. So forks can be patched too, and what a
user has edited beside the patch is kept. `change` applies and reverts, `liveness` asks whether the
hooks are called; `cli/jobs/patch.py` calls both.
"""
