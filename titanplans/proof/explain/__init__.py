"""Why a case fails: the conditions that it needs, and the module where it first shows."""
