"""Small trainings on this machine, of `envpipe quickstart` and `envpipe prove`.

Enter at `run.run_trial`. `settings` has the job and the arms that train it, `machine` looks at the
GPUs; a `run.Trial` starts ranks of `worker`, and makes claims and `results` of what they report.
"""
