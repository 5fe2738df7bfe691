"""Why a case fails: the conditions that it needs, and its first wrong tensor."""
