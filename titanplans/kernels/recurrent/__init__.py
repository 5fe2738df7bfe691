"""Linear attention, delta rules and state spaces: their recurrences, by chunks."""
