"""Alembic's entry: runs the revisions on the connection that ``migrate`` hands over."""

from alembic import context

from service.jobs.tables import Table

context.configure(connection=context.config.attributes["connection"], target_metadata=Table.metadata)

with context.begin_transaction():
    context.run_migrations()
