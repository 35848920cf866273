"""What each part of EnvPipe does, on four RTX 3090 (EnvPipe's figure 10).

python benchmarks/fig10.py
"""

from figures.command import figure_command

if __name__ == "__main__":
    figure_command("fig10")()
