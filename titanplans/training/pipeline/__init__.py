"""Pipeline parallelism of a job: the stages of a process and the schedule that runs them (`pipeline.py`)."""
