"""What is read of Megatron's log where predictions are held against training."""

from benchmarks.search.gpu_run import read_log

LINE = " [2026-01-01] iteration {0:8d}/ 30 | elapsed time per iteration (ms): {1} | lm loss: 1 |\n"
MEMORY = "[Rank {}] (after {} iterations) memory (MB) | allocated: 5.00 | max allocated: {} | x\n"


def test_the_warm_up_is_left_out_and_the_last_peak_counts():
    lines = [LINE.format(n, 9000.0 if n <= 10 else 1000.0 + n) for n in range(1, 31)]
    memory = [MEMORY.format(rank, n, n + rank / 2) for n in (1, 30) for rank in (0, 1)]
    found = read_log("".join([*lines, *memory]))
    assert found["iteration_s"] == [1 + n / 1000 for n in range(11, 31)]
    assert found["peak_bytes"] == {"0": 30 * 2**20, "1": 30.5 * 2**20}
