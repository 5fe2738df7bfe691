"""The job: a TOML file becomes a `Trainer` (`trainer/trainer.py`) over the models and plans of this project.

Some of its parts are torchtitan's, which nothing outside of this package needs; only `cli` imports it. Importing the package
itself imports nothing.
"""
