"""The command line: titanplans train | verify | list | async-tp | sweep. Importing it needs no torch."""
