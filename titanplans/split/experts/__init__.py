"""The cut by experts: a rank holds some experts whole, and rows are sent to them."""
