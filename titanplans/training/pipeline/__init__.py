"""Pipeline parallelism of a job: a rank's stages and the schedule that runs them. Start at `pipeline.py`."""
