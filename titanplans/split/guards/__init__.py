"""What a split model's calls may ask, and what is refused there."""
