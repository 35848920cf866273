"""Greedy and balanced reconfiguring, on four V100 (EnvPipe's figure 11).

python benchmarks/fig11.py
"""

from figures.command import figure_command

if __name__ == "__main__":
    figure_command("fig11")()
