"""Which copies of a job's state are due. Pure: ranks given the same inputs decide the same."""


class DueCopies:
    """Tracks what is due from step to step. A checkpoint stays due until the store has one of its step or a later one.

    Args:
        steps: The job's last step, whose checkpoint is always due.
        store_every_steps: How often a checkpoint is due.
        memory_every_steps: How often a copy in memory is due; ``None`` for never.

    Attributes:
        store: The newest step whose checkpoint is due and not known to be in the store; 0 if there is none.
        memory: Whether a copy in memory is due.
        wanted: Whether the state is to be copied as soon as possible.
    """

    def __init__(self, steps: int, store_every_steps: int, memory_every_steps: int | None) -> None:
        self._steps, self._store_every, self._memory_every = steps, store_every_steps, memory_every_steps
        self.store, self.memory, self.wanted = 0, False, False

    @property
    def is_last(self) -> bool:
        """Whether the checkpoint that is due is the job's last."""
        return self.store >= self._steps

    def resumed(self, step: int, stored_step: int | None) -> None:
        """Take note of a loaded state.

        Args:
            step: Steps done.
            stored_step: The newest step that the store has; ``None`` if unknown.
        """
        due = step if step >= self._steps else step - step % self._store_every
        self.store = due if stored_step is None or stored_step < due else 0
        self.memory = self._memory_every is not None and step > 0
        self.wanted = self.memory or self.store > 0

    def after(self, step: int) -> bool:
        """Return whether the state is to be copied after a step."""
        return self.wanted or self.stores(step) or self._remembers(step)

    def stores(self, step: int) -> bool:
        """Return whether a checkpoint of this very step is due."""
        return step == self._steps or step % self._store_every == 0

    def _remembers(self, step: int) -> bool:
        # The last one, too: nothing else keeps the state while waiting for the store.
        return self._memory_every is not None and (step == self._steps or step % self._memory_every == 0)

    def reached(self, step: int) -> None:
        """Take note of a completed step."""
        if self.stores(step):
            self.store = step
        self.memory |= self._remembers(step)
        self.wanted |= self.stores(step) or self._remembers(step)

    def copied(self) -> None:
        """Take note that the state has been copied for everything that is due."""
        self.memory = self.wanted = False

    def stored(self, step: int) -> None:
        """Take note that the store has a checkpoint of a step."""
        if step >= self.store:
            self.store = 0
