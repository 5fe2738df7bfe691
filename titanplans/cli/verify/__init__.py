"""`titanplans verify`: build the model of a SUBJECT, prove its plan, and print the result. Start at `main.py`."""
