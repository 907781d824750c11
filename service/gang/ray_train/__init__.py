"""A gang as a run of Ray Train. The one place that leans on what Ray Train does not promise to keep.

Ray Train's controller, worker group and training threads carry the gang; what its policies would decide is decided by
the gang's own controller. Ray Train's runs in a thread of the supervisor. A generation of the gang is an attempt of the
run: Ray Train starts and shuts down a worker group for each by its own path, but the workers are there before it and
live on after it, so that survivors keep what they have in memory.

Importing this imports Ray Train, pandas and pyarrow: supervisors and workers do, the service's own process does not.
"""
