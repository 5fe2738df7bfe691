"""Models of titanplans in torchtitan's own trainer."""
