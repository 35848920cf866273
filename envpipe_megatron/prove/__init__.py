"""`envpipe prove`: what EnvPipe saves on the GPUs of this machine, against what others could do.

Enter by `run.run_prove`. The command (`run`) looks at the machine (`machine`), starts the ranks
(`worker`), and writes down what they tell (`results`, from `claims` and `page`). Ranks train
`arms` in turns (`turns`).
"""
