"""Low precision: float8, NF4, autocast, and the tensors that a 16-bit model keeps in float32."""
