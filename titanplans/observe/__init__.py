"""The communication and compilation of a step: recorded, compared with the bound, and reported."""
