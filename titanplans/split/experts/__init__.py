"""Expert parallelism: a rank holds some of the experts, each of them complete, and tokens are sent to them."""
