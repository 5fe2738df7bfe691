"""Weights in Hugging Face's form: from a folder into a model that is split, and back.

    compare.py   how a folder's tensors differ from a model's, in words
    lazy.py      tensors that are read part by part, through torch's functions
    names.py     published names and those of the module tree, by transformers' own conversions
    load.py      each rank's parts of a folder into its parts of a model
    gather.py    whole tensors of a split model, one after the other, on rank 0
    full.py      full state dicts to split models and back, and those of their optimizers
    save.py      a split model to a folder
    files.py     the files of a folder, as rank 0 writes them
    atomic.py    a folder that exists whole or not at all

Importing the package imports nothing.
"""
