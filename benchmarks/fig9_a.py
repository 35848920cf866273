"""Energy and throughput of four models on four V100 (EnvPipe's figure 9(a)).

python benchmarks/fig9_a.py
"""

from figures.command import figure_command

if __name__ == "__main__":
    figure_command("fig9_a")()
