"""A job before it runs: its checks, its folder, and torchtitan's config of it."""
