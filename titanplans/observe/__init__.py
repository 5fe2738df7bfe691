"""What a step communicates and compiles: counted by the recorder, held against the bound, and reported."""
