"""The job: a TOML file becomes a torchtitan `Trainer` over the models and plans of this project.

Everything that is torchtitan's trainer lives in this package, and nothing here is imported by
`plans`, `models` or `parallel`. Importing the package itself imports nothing: the device has to be
settled (`titanplans.training.device.prepare_device`) before the first import of torchtitan.
"""
