"""Weights in Hugging Face's format: from a folder into a split model, and from a split model to a folder.

    compare.py   how a folder's tensors differ from a model's, in words
    lazy.py      tensors whose values are read when needed, slice by slice, through torch's functions
    names.py     names in a folder <-> parameter names, by transformers' own conversions
    load.py      a folder into a split model; each rank reads its slices
    gather.py    full tensors of a split model, one at a time, on rank 0
    merged.py    adapters merged into their base weights
    full.py      full state dicts of models and optimizers, gathered and loaded
    save.py      a split model to a folder
    adapters.py  adapters in peft's files
    folder.py    the safetensors files of a folder, and how they are read
    files.py     the files of a folder, and how rank 0 writes them
    atomic.py    folders that are complete or absent; errors of rank 0 on all ranks

Importing this package imports nothing.
"""
