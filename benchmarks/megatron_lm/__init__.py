"""Proof that a patched Megatron-LM trains as the unmodified one; `prove.py`."""
