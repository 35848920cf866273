"""What each ingredient of EnvPipe is worth; `ablation.py`."""
