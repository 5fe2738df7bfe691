"""From a command line to ranks and to an exit status."""
