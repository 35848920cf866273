"""Fewer and more microbatches, on four V100 (EnvPipe's figure 13).

python benchmarks/fig13.py
"""

from figures.command import figure_command

if __name__ == "__main__":
    figure_command("fig13")()
