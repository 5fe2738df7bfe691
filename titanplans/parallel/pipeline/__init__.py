"""Pipeline parallelism: splitting blocks into stages, the timeline of a schedule, and a picture of it."""
