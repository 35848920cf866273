"""Small trainings on this machine, of `envpipe quickstart` and `envpipe prove`.

Enter at `run.run_trial`. `settings` has the job and the arms that train it; `run` looks at the
machine, starts ranks of `worker`, and gives what they report to its `Quickstart` or `proof.Proof`.
"""
