"""The sections of a job, one dataclass each; each field carries its documentation as the string under it."""
