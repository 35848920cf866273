"""`envpipe quickstart`: a small GPT trained with and without EnvPipe, on this machine."""
