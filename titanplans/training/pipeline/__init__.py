"""Pipeline parallelism in torchtitan's trainer: the stages of a process, and the schedule that runs them."""
