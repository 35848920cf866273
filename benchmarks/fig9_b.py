"""Energy and throughput of five models on four RTX 3090 (EnvPipe's figure 9(b)).

python benchmarks/fig9_b.py
"""

from figures.command import figure_command

if __name__ == "__main__":
    figure_command("fig9_b")()
