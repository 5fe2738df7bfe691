"""The sections of a job, one model each; each field carries its documentation as the string under it."""
