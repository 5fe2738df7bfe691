"""Test of `MyPlan`."""

from titanplans import verify
from titanplans.modeling import build_real, load_config


def test_the_split_model_equals_the_unsplit_model():
    """`verify` compares the two models in every pair of conditions."""
    config = load_config("my_model", "debug", width=32, heads=4, layers=2, vocabulary=64)
    assert verify(lambda: build_real(config)).passed
