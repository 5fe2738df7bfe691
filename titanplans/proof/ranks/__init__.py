"""The ranks of a proof: threads of this process, or the processes of a process group."""
