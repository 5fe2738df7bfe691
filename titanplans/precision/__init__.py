"""Numbers of fewer bits: float8, NF4, autocast, and what a model keeps in float32."""
