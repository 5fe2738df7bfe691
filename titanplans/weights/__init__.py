"""Weights in Hugging Face's format: load a folder into a split model, and save a split model as a folder.

    load.py      loads a folder into a split model; each rank reads its slices
    save.py      saves a split model as a folder
    full.py      gathers and loads full state dicts of models and optimizers
    adapters.py  saves and loads adapters in peft's files
    merged.py    merges adapters into their base weights
    gather.py    gathers the full tensors of a split model, one at a time, on rank 0
    names.py     converts names in a folder to parameter names and back, with transformers' conversions
    lazy.py      tensors whose values are read when needed, slice by slice, through torch's functions
    compare.py   describes how a folder's tensors differ from a model's
    folder.py    reads the safetensors files of a folder
    files.py     writes the files of a folder, on rank 0
    atomic.py    folders that are complete or absent; raises rank 0's errors on all ranks

Importing this package imports none of its modules.
"""
