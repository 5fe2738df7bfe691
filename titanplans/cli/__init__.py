"""The command line: `main.py` runs `titanplans COMMAND`, each command from its own module. Importing it needs no torch."""
