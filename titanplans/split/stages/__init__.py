"""Pipeline stages: a model split into runs of consecutive blocks; each stage keeps the model's own forward."""
