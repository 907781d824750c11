"""A gang as a run of Ray Train. The only place that relies on Ray Train internals.

The gang runs in Ray Train's controller, worker group and training threads; its policies' decisions are made by
the gang's own controller. Ray Train's controller runs in a thread of the supervisor. A generation is an attempt of the
run: Ray Train starts and shuts down a worker group for each in its usual way, but the workers exist before it and
outlive it, so that survivors keep what they have in memory.

Importing this imports Ray Train, pandas and pyarrow: supervisors and workers do, the service's own process does not.
"""
