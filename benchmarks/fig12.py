"""Megatron-1.3B on two nodes of eight V100 (EnvPipe's figure 12).

python benchmarks/fig12.py
"""

from figures.command import figure_command

if __name__ == "__main__":
    figure_command("fig12")()
