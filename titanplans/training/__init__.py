"""The job: a TOML file becomes a torchtitan `Trainer` over the models and plans of this project.

Everything that needs torchtitan's Trainer is in this package, which only `cli` imports. Importing the package itself
imports nothing: the device has to be settled (`trainer.device.prepare_device`) before torchtitan is imported.
"""
