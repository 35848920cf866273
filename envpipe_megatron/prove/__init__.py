"""`envpipe prove`: what EnvPipe saves on the GPUs of this machine, against what others could do.

Enter at `run.run_prove`. `settings` has the arms and looks at the machine; `run` starts the ranks,
which train the arms in turns (`worker`); `results` writes down what they report, and `claims` what
that shows.
"""
