"""The trainings of the unsplit and of the split model, compared quantity by quantity."""
