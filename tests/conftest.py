"""Stands here so that tests of every folder can import `rank_pool`."""
