"""Patches for checkouts of training frameworks: found, applied, proven live, and taken back.

A checkout is somebody's own folder, so every step is exact: files are known by their sha256, a
patch applies at its stated lines or not at all, and whatever stops a change halfway leaves a tree
that the next call brings to an end.
"""
