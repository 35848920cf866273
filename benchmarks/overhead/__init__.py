"""What the machinery costs the training thread, the host and the disk; `overhead.py`."""
