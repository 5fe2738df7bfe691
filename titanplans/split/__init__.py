"""The tools of a split model: the stream and its borders, collectives, parameters that are read locally, guards."""
