"""Nodes of a job: those of a hostfile, started over ssh, and those that SLURM's srun starts."""
